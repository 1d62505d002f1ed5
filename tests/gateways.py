"""A gateway in this process, over real sockets on both sides, for the tests of HTTP."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from fake_driver import PATIENCE
from starlette.middleware import Middleware

from ipc.gateway.access.callers import Callers
from ipc.gateway.access.connection_limit import ConnectionLimit
from ipc.gateway.app import make_app
from ipc.gateway.http_protocol import Protocol
from ipc.gateway.upstream import remote_daemon
from ipc.gateway.upstream.daemons import Daemons
from ipc.gateway.upstream.remote_daemon import RemoteDaemon

WITHOUT_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of gateways here: httpx reads all certificates of authorities for each of its own."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
remote_daemon.STATUS_TIMEOUT = PATIENCE  # those that are asked here are there


class Server(uvicorn.Server):
    """Ends when it is to, and not up to two tenths of a second later."""

    async def main_loop(self) -> None:
        """As uvicorn's."""
        while not await self.on_tick(counter=0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        del sockets
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)
        await self.lifespan.shutdown()


@contextmanager
def gateway(
    *addresses: str | RemoteDaemon,
    timeout: float = PATIENCE,
    callers: Callers | None = None,
    key: Path | None = None,
    limit: ConnectionLimit | None = None,
    proxies: tuple[str, ...] = (),
    around: Sequence[Middleware] = (),
    **options: Any,
) -> Iterator[httpx.Client]:
    """A client of a gateway to the daemons at these addresses, for the time of a with statement; they have ``timeout`` to answer.

    ``options`` are RemoteDaemon's.
    """
    remote = [
        RemoteDaemon(daemon, key, timeout, **options) if isinstance(daemon, str) else daemon for daemon in addresses
    ]
    app = make_app(Daemons(remote), callers or Callers(), around)
    config = uvicorn.Config(
        app,
        log_config=None,
        http=partial(Protocol, limit=limit),
        lifespan="on",
        ws="none",
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
    )
    server = Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=PATIENCE, verify=WITHOUT_TLS) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def once_reached(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer that is not one for a daemon which did not answer in its time, or which is no more."""
    deadline = time.monotonic() + PATIENCE
    while (answer := ask()).status_code in (502, 503):
        assert time.monotonic() < deadline, answer.text
    return answer


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, comments left out; the last of all is ``[DONE]``, which is left out too."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.read().decode().split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if block and not block.startswith(":")]
    assert data.pop() == "[DONE]"
    return [msgspec.json.decode(one) for one in data]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A body with one turn of a user's."""
    return {"messages": [{"role": "user", "content": text}], **fields}
