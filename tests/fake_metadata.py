"""A metadata server as Compute Engine has it, whose values a test changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from fake_driver import PATIENCE

ROOT = "/computeMetadata/v1/instance/"


class FakeMetadata:
    """Values by key, and how often each was asked for; ``broken`` is a status in place of any value."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.asked: list[str] = []
        self.broken: int | None = None
        self.flavor = "Google"
        self.ends = False
        self.changed = threading.Condition()
        self.host = ""

    def set(self, key: str, value: str) -> None:
        """Give a key another value, of which whoever waits is told."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def heal(self) -> None:
        """Break no more."""
        with self.changed:
            self.broken = None
            self.changed.notify_all()

    def until_asked(self, times: int, key: str | None = None) -> None:
        """Wait until a key has been asked for so often, or all keys together."""
        with self.changed:
            assert self.changed.wait_for(lambda: sum(key in (None, asked) for asked in self.asked) >= times, PATIENCE)

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and value; waits for a change if it is asked to."""
        parts = urlsplit(path)
        key, query = parts.path.removeprefix(ROOT), parse_qs(parts.query)
        if headers.get("Metadata-Flavor") != "Google" or not parts.path.startswith(ROOT):
            return 403, ""
        with self.changed:
            self.asked.append(key)
            self.changed.notify_all()
            if "wait_for_change" in query:
                known = query["last_etag"][0]
                self.changed.wait_for(lambda: self.ends or _etag(self.values.get(key, "")) != known, 60)
            if self.broken is not None:
                return self.broken, ""
            return (200, self.values[key]) if key in self.values else (404, "")


def _etag(value: str) -> str:
    return value.encode().hex() or "0"


@contextmanager
def metadata_server() -> Iterator[FakeMetadata]:
    """One that listens at its ``host``."""
    fake = FakeMetadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = fake.answer(self.path, dict(self.headers))
            self.send_response(status)
            self.send_header("Metadata-Flavor", fake.flavor)
            self.send_header("ETag", _etag(value))
            self.end_headers()
            self.wfile.write(value.encode() + b"\n")

        def log_message(self, *_: object) -> None: ...

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that waited for a change has gone meanwhile."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        fake.host = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        with fake.changed:
            fake.ends = True
            fake.changed.notify_all()
        server.shutdown()
        thread.join()
