"""A Hugging Face hub of this machine: the addresses that huggingface_hub asks for a model's files, and its refusals."""

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves the files of ``repositories``, by name and path. What was asked for is in ``asked``, with its Range."""

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    token: str = "hf_right"
    broken: dict[str, int] = field(default_factory=dict)
    """By file, after how many bytes the first connection for it is cut."""
    resets: bool = False
    """Whether it is cut by a reset, and not just closed."""
    xet: bool = False
    """Whether it says that its files are in a Xet storage."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def names(self, method: str) -> list[str]:
        """The files that were asked for by this method, in order."""
        return [path.rpartition("/")[2] for asked, path, _ in self.asked if asked == method and "/resolve/" in path]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub for the time of a with statement."""
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client may hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers["Range"]))
        if path.startswith("/api/models/"):
            repository, _, rest = _split(path.removeprefix("/api/models/"))
            if self._may(repository):
                self._about(repository, rest)
        else:
            repository, _, rest = _split(path.removeprefix("/"))
            if self._may(repository, files=True):
                self._file(repository, rest.partition("/")[2])

    def _may(self, repository: str, *, files: bool = False) -> bool:
        hub, given = self.hub, self.headers["Authorization"]
        if given not in (None, f"Bearer {hub.token}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repository not in hub.repositories or (repository in hub.private and given is None):
            self._refuse(401 if given is None else 404, "RepoNotFound", "Repository not found")
        elif files and repository in hub.gated:
            self._refuse(403, "GatedRepo", f"Access to model {repository} is restricted")
        else:
            return True
        return False

    def _about(self, repository: str, rest: str) -> None:
        kind, _, revision = rest.partition("/")
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        root = self.hub.repositories[repository]
        files = sorted(path for path in root.rglob("*") if path.is_file())
        if kind == "revision":
            siblings = [{"rfilename": str(path.relative_to(root))} for path in files]
            self._json({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings})
        else:
            self._json(
                [
                    {
                        "type": "file",
                        "path": str(path.relative_to(root)),
                        "size": path.stat().st_size,
                        "oid": _etag(path),
                    }
                    for path in files
                ]
            )

    def _file(self, repository: str, name: str) -> None:
        path = self.hub.repositories[repository] / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        content, status = path.read_bytes(), 200
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Accept-Ranges", "bytes")
        if self.hub.xet:
            self.send_header("X-Xet-Hash", "0" * 64)
            self.send_header("X-Xet-Refresh-Route", f"{self.hub.url}/api/models/{repository}/xet-read-token/{COMMIT}")
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            cut = self.hub.broken.pop(name, None)
            self.wfile.write(content[begin : None if cut is None else begin + cut])
            self.close_connection = cut is not None
            if cut is not None and self.hub.resets:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())

    def _json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _split(path: str) -> tuple[str, str, str]:
    """A repository's name, and what is asked of it: ``OWNER/NAME/revision/main``."""
    owner, name, *rest = path.split("/")
    return f"{owner}/{name}", "", "/".join(rest[1:] if rest[0] == "resolve" else rest)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
