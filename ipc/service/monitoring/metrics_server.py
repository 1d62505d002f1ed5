"""``/metrics`` for Prometheus and ``/health`` for load balancers, over HTTP, for reading only.

It listens from the beginning of the start, so that a port in use is found before anything is
loaded. Until the daemon is READY, and while it makes no progress, ``/health`` is 503. No client
can block it: each connection is for one request and has a deadline, and beyond MAX_CONNECTIONS the
oldest is closed, since an honest request is short.
"""

import asyncio
import errno
import io
import logging
import socket
import threading
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ipc.errors import AddressError, AddressInUse
from ipc.process.http_socket import http_url
from ipc.service.monitoring.exposition import Exposition

logger = logging.getLogger(__name__)

DEADLINE = 10.0
"""Seconds that a request may take to come and its answer to be read."""
MAX_CONNECTIONS = 64
"""Open at once."""
MAX_HEAD_BYTES = 1 << 14
"""The limit of a request's first line and headers."""
BACKLOG = 128
"""Connections that wait to be accepted."""
PLAIN = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, media type and body."""


class MetricsServer:
    """Serves from ``start`` to ``stop``. ``health`` returns what is wrong, or None."""

    def __init__(self, host: str, port: int, health: Callable[[], str | None], exposition: Exposition) -> None:
        self._host, self._port = host, port
        self._health = health
        self._registry = exposition.registry
        self._runner = asyncio.Runner()
        self._stopping = asyncio.Event()
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        """Connections, the oldest first, and the task that answers each."""

    def start(self) -> None:
        """Bind the port; raises AddressError where that fails."""
        address = self.url
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listening = socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"address in use: another program listens at {address}, for metrics") from error
            raise AddressError(f"cannot listen at {address} for metrics: {error.strerror or error}") from error
        self._port = self._listening.getsockname()[1]
        self._runner.get_loop()
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, with the port that was found free where 0 was asked for."""
        return http_url(self._host, self._port)

    def stop(self) -> None:
        """Give the port back, where it was taken."""
        if self._listening is not None:
            self._runner.get_loop().call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listening, limit=MAX_HEAD_BYTES)
        await self._stopping.wait()
        # Not wait_closed(), which from Python 3.12.1 on waits for clients to hang up: leaving the
        # runner cancels the tasks of open connections, and each aborts its own.
        server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) == MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        # A task of ours: asyncio logs a traceback for one of its own that is cancelled (3.11).
        self._open[writer] = asyncio.create_task(self._answer_one(reader, writer))

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                writer.write(self._response(await reader.readuntil(b"\r\n\r\n")))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # hung up on, by one of us
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _response(self, head: bytes) -> bytes:
        first, _, rest = head.partition(b"\r\n")
        method, _, target = first.decode("latin-1").rpartition(" ")[0].partition(" ")
        try:
            status, media_type, body = self._answer(method, target.partition("?")[0], parse_headers(io.BytesIO(rest)))
        except HTTPException:
            status, media_type, body = _text(HTTPStatus.BAD_REQUEST, "the headers are malformed")
        except Exception:  # of one collector, and the next scrape may go well
            logger.exception("%s was not answered", target)
            status, media_type, body = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "see the daemon's log")
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {media_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body)

    def _answer(self, method: str, path: str, headers: Message) -> Answer:
        if method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "this is for reading only")
        match path:
            case "/metrics":
                encode, media_type = _encoder(headers.get("Accept", ""))
                return HTTPStatus.OK, media_type, encode(self._registry)
            case "/health":
                wrong = self._health()
                return _text(HTTPStatus.OK if wrong is None else HTTPStatus.SERVICE_UNAVAILABLE, wrong or "")
            case _:
                return _text(HTTPStatus.NOT_FOUND, "there are /metrics and /health")


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """The format that a client prefers; the plain one where its header makes no sense."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return choose_encoder("")


def _text(status: HTTPStatus, words: str) -> Answer:
    return status, PLAIN, f"{words}\n".encode() if words else b""
