"""The pieces of one completion, or of several at once, such as those of a list of prompts."""

import asyncio
from collections.abc import AsyncIterator

from ipc.gateway.access.memory_limit import HeldMemory
from ipc.gateway.asking import Answer
from ipc.wire.completion import Completion, Piece, whole

News = tuple[int, Piece] | Exception | None


async def gathered(streams: list[Answer], held: HeldMemory) -> list[Completion]:
    """All of them, whole, as ``held`` has room for; when one fails the others are aborted."""
    tasks = [asyncio.create_task(_gathered(stream, held)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: list[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield the streams' pieces with the stream's number; if one fails, the others are aborted."""
    if len(streams) == 1:
        async with streams[0] as only:
            async for piece in only:
                yield 0, piece
        return
    queue: asyncio.Queue[News] = asyncio.Queue(maxsize=1)  # a slow reader blocks the streams
    tasks = [asyncio.create_task(_pour(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                num_open -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()


async def _gathered(stream: Answer, held: HeldMemory) -> Completion:
    pieces = []
    async with stream as from_daemon:
        async for piece in from_daemon:
            held.add_piece(piece)
            pieces.append(piece)
    return whole(pieces)


async def _pour(number: int, stream: Answer, queue: asyncio.Queue[News]) -> None:
    try:
        async with stream as from_daemon:
            async for piece in from_daemon:
                await queue.put((number, piece))
    except Exception as error:  # noqa: BLE001  # the reader of the queue raises it
        await queue.put(error)
    else:
        await queue.put(None)
