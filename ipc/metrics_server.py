"""``/metrics`` for Prometheus and ``/health`` for whoever routes requests, over HTTP and for reading only.

It listens from the start on, so that a port that is taken is found before anything is loaded; until the daemon is READY,
and while it makes no progress, ``/health`` is 503.
"""

import errno
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app

from ipc.errors import AddressError, AddressInUse
from ipc.exposition import Exposition

READ_TIMEOUT = 10.0
"""Seconds that a request may take to arrive; who is slower is hung up on."""


class MetricsServer:
    """Serves from ``start`` to ``stop``. ``health`` says what is wrong, or nothing, on a thread of this server."""

    def __init__(self, host: str, port: int, health: Callable[[], str | None], exposition: Exposition) -> None:
        self._host, self._port = host, port
        self._health = health
        self._server: WSGIServer | None = None
        self._metrics = make_wsgi_app(exposition.registry)

    def start(self) -> None:
        """Take the port; raises AddressError where that cannot be had."""
        address = f"http://{self._host}:{self._port}"
        try:
            server = make_server(self._host, self._port, self._answer, _Server, _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"address in use: another program listens at {address}, for metrics") from error
            raise AddressError(f"cannot listen at {address} for metrics: {error.strerror or error}") from error
        self._server = server
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens, with the port that was found free where 0 was asked for."""
        return f"http://{self._host}:{self._port if self._server is None else self._server.server_port}"

    def stop(self) -> None:
        """Give the port back, where it was taken."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                page: Iterable[bytes] = self._metrics(environ, start_response)
                return page
            case "/health":
                wrong = self._health()
                return _text(start_response, "200 OK" if wrong is None else "503 Service Unavailable", wrong or "")
            case _:
                return _text(start_response, "404 Not Found", "there are /metrics and /health")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = READ_TIMEOUT

    def log_message(self, *_: object) -> None:
        """Nothing: a scrape is no news."""


def _text(start_response: StartResponse, status: str, words: str) -> list[bytes]:
    body = f"{words}\n".encode() if words else b""
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]
