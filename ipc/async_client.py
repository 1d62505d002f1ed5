"""``ipc.client`` for asyncio; it loads no jax.

    async with AsyncClient() as client:
        async for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)

A request starts when ``generate`` or ``chat`` is called, not when its first piece is awaited.
Cancelling the task that awaits a piece, leaving the loop early, closing or dropping the stream
aborts it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from ipc.base_client import Answer, BaseClient, BaseStream, expected
from ipc.connection.call import Call, Interrupted, Outcome, Put
from ipc.control_client import ControlClient
from ipc.wire.completion import Completion, Piece, whole
from ipc.wire.messages import AdaptersReply, Done, ListAdapters, TokenizerInfo, TokenizerInfoReply, Welcome

Outcomes = asyncio.Queue[Outcome]
Successor = Callable[[Interrupted], Awaitable["AsyncClient"]]
"""The client that goes on with an interrupted completion; raises the OdriverError that ends it where there is none."""


class AsyncClient(BaseClient["AsyncStream"]):
    """A connection to a daemon; any number of tasks, of any loop, may use one, with many requests
    at once.

    ``async with`` connects, and so does the first request. ``address`` None is where ``odriver
    serve`` listens by default. ``timeout`` is how many seconds a daemon has to answer when it is
    connected to; one that is just starting is waited for as long. Raises AddressError at once;
    awaiting raises ConnectFailed if no daemon answers. A request that a daemon has accepted may
    take its time: it ends with an answer, or with ConnectionLost when the daemon goes away or
    hangs. The next request after that connects anew. ``resume`` and ``key`` are as in ``Client``.
    """

    def _start(self) -> None:
        self._loop_queues: dict[asyncio.AbstractEventLoop, _LoopQueue] = {}
        self._successor: Successor | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> Welcome:
        """Connect, if not connected; returns the daemon's welcome. Raises ConnectFailed."""
        return self.welcome if self._connection.is_up else await self._answer(self._connection.connect, Welcome)

    async def complete(self, prompt: str | list[int], **params: Any) -> Completion:
        """As ``generate``, and wait for the whole, which comes at once."""
        async with self.generate(prompt, stream=False, **params) as stream:
            return whole([piece async for piece in stream])

    async def tokenize(self, prompt: str | None = None, **options: Any) -> list[int]:
        """As ``Client.tokenize``."""
        return (await self._answer(self._tokenizing(prompt, **options), Done)).token_ids

    async def detokenize(self, token_ids: list[int], *, model: str | None = None) -> str:
        """The text of token ids, special ones as they are spelt."""
        return (await self._answer(self._detokenizing(token_ids, model), Done)).text

    async def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer, by the names of Hugging Face's tokenizer_config.json."""
        return (await self._answer(partial(self._connection.ask, message_of=TokenizerInfo), TokenizerInfoReply)).info

    async def adapters(self) -> list[dict[str, Any]]:
        """As ``Client.adapters``."""
        return (await self._answer(partial(self._connection.ask, message_of=ListAdapters), AdaptersReply)).adapters

    async def status(self) -> dict[str, Any]:
        """The daemon's numbers: what runs and waits, pages, steps, tokens and more."""
        return await asyncio.to_thread(self._asked, ControlClient.status)

    async def metrics(self) -> str:
        """The daemon's metrics in Prometheus's text format."""
        return await asyncio.to_thread(self._asked, ControlClient.metrics)

    async def close(self) -> None:
        """Close the connection. Open requests are aborted, and end with ConnectionLost."""
        await asyncio.to_thread(self._finalizer)

    def _stream(self, **question: Any) -> "AsyncStream":
        outcomes, put = self._new_queue()
        is_handed_back = self._successor is not None
        call = self._connection.generate(put, user=self._user, is_handed_back=is_handed_back, **question)
        stream = AsyncStream(self, self._connection, call, outcomes)
        stream._successor = self._successor
        return stream

    async def _answer(self, ask: Callable[[Put], Call], kind: type[Answer]) -> Answer:
        """Send a request and return its answer; raises the OdriverError that comes instead. It is aborted if the task is
        cancelled meanwhile."""
        outcomes, put = self._new_queue()
        call = ask(put)
        try:
            return expected(await outcomes.get(), kind)
        except asyncio.CancelledError:
            self._connection.abort(call)
            raise

    def _new_queue(self) -> tuple[Outcomes, Put]:
        """A queue of the running loop, and how the connection's thread puts into it."""
        loop, outcomes = asyncio.get_running_loop(), Outcomes()
        if loop not in self._loop_queues:
            for other in [other for other in list(self._loop_queues) if other.is_closed()]:
                self._loop_queues.pop(other, None)
        loop_queue = self._loop_queues.setdefault(loop, _LoopQueue(loop))
        return outcomes, partial(loop_queue.put, outcomes)


def succeeded(client: AsyncClient, successor: Successor) -> AsyncClient:
    """A client over the same connection, which resumes, whose interrupted completions do not wait in it: another
    client may go on with them."""
    other = client.on_behalf_of(client._user)
    other._successor = successor
    return other


class AsyncStream(BaseStream[Outcomes]):
    """The pieces of one completion as they come, for one task to iterate over once."""

    _successor: Successor | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """The next piece. Raises RequestFailed if the daemon could not do it, ConnectionLost if it
        went away.

        The request is aborted if the task is cancelled meanwhile.
        """
        if self._ended:
            raise StopAsyncIteration
        self._connection.check_process()
        try:
            outcome = await self._outcomes.get()
            while isinstance(outcome, Interrupted):
                await self._go_on(outcome)
                outcome = await self._outcomes.get()
            piece = self._taken(outcome)
        except asyncio.CancelledError:
            self._abort()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def _go_on(self, interrupted: Interrupted) -> None:
        """Have another client go on, or the same; nobody has the request meanwhile."""
        assert self._successor is not None
        self._ended = True
        client = await self._successor(interrupted)
        self._client, self._connection, self._successor = client, client._connection, client._successor
        self._call = self._connection.go_on(interrupted, self._call.put)
        self._ended = False

    async def close(self) -> None:
        """Abort the request if it has not ended; nothing more comes."""
        self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._abort()


class _LoopQueue:
    """Passes outcomes from the connection's thread to one event loop; one wake-up serves many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left: deque[tuple[Outcomes, Outcome]] = deque()
        self._rung = False

    def put(self, outcomes: Outcomes, outcome: Outcome) -> None:
        self._left.append((outcomes, outcome))
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._rung = False  # before the loop: a concurrent ``put`` then rings again
        while self._left:
            outcomes, outcome = self._left.popleft()
            outcomes.put_nowait(outcome)
