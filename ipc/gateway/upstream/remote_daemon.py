"""A daemon behind the gateway, which may come and go."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ipc.async_client import AsyncClient
from ipc.errors import ConnectFailed, ConnectionLost, DaemonStarting, RequestFailed
from ipc.gateway.access.callers import Caller
from ipc.gateway.output.dialect import Dialect, dialect_of
from ipc.wire.messages import Welcome

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
STATUS_TIMEOUT = 3.0
"""Seconds that it has to say how it is, and which adapters it has."""
RETRY_INTERVAL = 1.0
"""Seconds between attempts to reach a daemon at the start."""


class RemoteDaemon:
    """A daemon, which may come and go; it has ``timeout`` seconds to answer a connection.

    Requests that it leaves open when it goes away end with an error, or with ``resume_timeout``
    are resumed if it comes back within so many seconds.
    """

    def __init__(
        self,
        address: str,
        key: Path | None = None,
        timeout: float = CONNECT_TIMEOUT,
        *,
        resume_timeout: float | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._options: dict[str, Any] = {"timeout": timeout}
        if resume_timeout is not None:
            self._options |= {"resume": True, "resume_timeout": resume_timeout}
        self.client = AsyncClient(address, key=key, **self._options)
        """The gateway's own connection."""
        self._clients: WeakKeyDictionary[Caller, AsyncClient] = WeakKeyDictionary()
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._returning: asyncio.Task[None] | None = None
        """Connects to it, since the start or since it was lost."""
        self._trouble: ConnectFailed | None = None
        """Why it was not there the last time; None where it was, or where nobody has looked yet."""
        self._resting: asyncio.Task[None] | None = None
        """Asks it whether it takes requests again."""
        self._parsers = tool_call_parser, reasoning_parser
        self._dialect: tuple[Welcome, Dialect] | None = None

    @property
    def model(self) -> str | None:
        """The model it served at the last connection; None before the first."""
        return next(iter(self.models), None)

    @property
    def models(self) -> list[str]:
        """All names of that model; empty before the first connection."""
        try:
            return self.client.welcome.models
        except ConnectFailed:
            return []

    @property
    def trouble(self) -> ConnectFailed | None:
        """Why it is away: it was there and has gone, or was looked for in vain; None otherwise. ``seek`` finds out."""
        return None if self.client.is_connected else self._trouble

    async def reach(self) -> None:
        """Be connected to it; raises ConnectFailed."""
        await self.client.connect()

    async def dialect(self) -> Dialect:
        """How its model writes; it is asked once each time that it has been connected to."""
        welcome = self.client.welcome
        if self._dialect is None or self._dialect[0] is not welcome:
            self._dialect = welcome, await dialect_of(self.client, *self._parsers)
        return self._dialect[1]

    def client_of(self, caller: Caller) -> AsyncClient:
        """The connection for a caller's requests; unnamed callers share the gateway's own."""
        if not caller.name:
            return self.client
        client = self._clients.get(caller)
        if client is None:
            client = self._clients[caller] = caller.client(self.address, **self._options)
        return client

    async def adapters(self, caller: Caller) -> list[dict[str, Any]]:
        """The adapters that a caller may use; none where no adapters are served. Raises ConnectFailed, also for a daemon
        that hangs, and ConnectionLost."""
        client = self.client_of(caller)
        await client.connect()
        return await self._in_time(client.adapters()) if client.welcome.enable_lora else []

    async def close(self) -> None:
        """End the connections."""
        for task in (self._returning, self._resting):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        for client in (self.client, *self._clients.values()):
            await client.close()

    async def status(self) -> dict[str, Any]:
        """Its status; raises ConnectFailed and RequestFailed. Concurrent calls ask it once."""
        return await self._asked("status", self.client.status)

    async def metrics(self) -> str:
        """Its metrics in Prometheus's text format; otherwise as ``status``."""
        return await self._asked("metrics", self.client.metrics)

    async def _asked(self, what: str, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.create_task(ask())
            asking.add_done_callback(lambda done: self._forget(what, done))
        return await self._in_time(asyncio.shield(asking))

    async def _in_time(self, asking: Awaitable[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(asking, STATUS_TIMEOUT)
        except TimeoutError:
            raise ConnectFailed.silent(self.address) from None

    def _forget(self, what: str, asking: asyncio.Task[Any]) -> None:
        del self._asking[what]
        if not asking.cancelled():
            asking.exception()  # mark as retrieved: the caller may have given up

    @property
    def rests(self) -> bool:
        """Whether it is to be spared requests: see ``spare``."""
        return self._resting is not None and not self._resting.done()

    def spare(self) -> None:
        """It has turned a request away as it drains or sleeps: until it does so no more, or is away, others of its
        model are asked."""
        if not self.rests:
            self._resting = asyncio.create_task(self._serves_again())

    async def _serves_again(self) -> None:
        state = ""
        while state != "serving" and self.client.is_connected:
            await asyncio.sleep(RETRY_INTERVAL)
            with suppress(ConnectFailed, ConnectionLost):  # it has nothing new to say
                try:
                    state = (await self.status())["state"]
                except RequestFailed:  # its status is not for this gateway: the next request shows
                    return

    def seek(self) -> asyncio.Task[None] | None:
        """Connect to it, retrying until it is there; what ends then, None where it is connected."""
        if self.client.is_connected:
            return None
        if self._returning is None or self._returning.done():
            if self.models:
                self._trouble = ConnectFailed.nobody(self.address)
            self._returning = asyncio.create_task(self._return())
        return self._returning

    def obstacle(self) -> asyncio.Task[None] | None:
        """What ends when it may be there and take requests again; None where it does."""
        return self.seek() or (self._resting if self.rests else None)

    async def _return(self) -> None:
        told = ""
        while True:
            try:
                await self.client.connect()
            except ConnectFailed as error:
                if str(error) != told and not isinstance(error, DaemonStarting):
                    logger.warning("%s", error)
                self._trouble, told = error, str(error)
                await asyncio.sleep(RETRY_INTERVAL)
            else:
                logger.info("connected to %s, which serves %s", self.address, self.model)
                self._trouble = None
                return
