"""The clients' side of a measurement beside ``http_client``: as that in one thread, through AsyncClient."""

import asyncio
import sys
import time

import msgspec
import uvloop

from ipc.async_client import AsyncClient
from ipc.benchmark.timeline import Timeline
from ipc.errors import OdriverError
from scripts.benchmarks.clients.client import PATIENCE
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.processes.child import answer_all


def main() -> None:
    """Serve as a child: a Workload a line, answered by the Timelines of its requests."""
    answer_all(lambda question: uvloop.run(run(sys.argv[1], msgspec.convert(question, Workload))))


async def run(address: str, workload: Workload) -> list[Timeline]:
    """All at once, to their ends."""
    async with AsyncClient(address, PATIENCE) as client:
        return await asyncio.gather(*(_follow(client, prompt, workload.max_tokens) for prompt in workload.prompts))


async def _follow(client: AsyncClient, prompt: list[int], max_tokens: int) -> Timeline:
    timeline = Timeline(len(prompt), time.monotonic())
    try:
        async for piece in client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
            if piece.token_ids:
                timeline.arrivals.append((time.monotonic(), len(piece.token_ids)))
    except OdriverError as error:
        timeline.error = str(error)
    return timeline


if __name__ == "__main__":
    main()
