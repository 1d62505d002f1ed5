"""The pieces of one completion, or of several at once, such as those of a list of prompts."""

import asyncio
from collections.abc import AsyncIterator

from ipc.async_client import AsyncStream
from ipc.completion import Completion, Piece, whole

News = tuple[int, Piece] | Exception | None


async def gathered(streams: list[AsyncStream]) -> list[Completion]:
    """All of them, whole; when one fails the others are aborted."""
    tasks = [asyncio.create_task(_gathered(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: list[AsyncStream]) -> AsyncIterator[tuple[int, Piece]]:
    """Their pieces as they come, with the number of the stream; when one fails the others are aborted."""
    if len(streams) == 1:
        async with streams[0] as only:
            async for piece in only:
                yield 0, piece
        return
    queue: asyncio.Queue[News] = asyncio.Queue()
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


async def _gathered(stream: AsyncStream) -> Completion:
    async with stream:
        return whole([piece async for piece in stream])


async def _pour(number: int, stream: AsyncStream, queue: asyncio.Queue[News]) -> None:
    try:
        async with stream:
            async for piece in stream:
                queue.put_nowait((number, piece))
    except Exception as error:  # noqa: BLE001  # raised by who waits for the queue
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
