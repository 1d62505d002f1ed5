"""The clients' side of a measurement through a gateway, a process of its own: as ``client``, but over HTTP."""

import asyncio
import sys
import time

import msgspec
import uvloop

from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.clients.http_stream import HttpFailed, post
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.processes.child import answer_all


def main() -> None:
    """Serve as a child: a Workload a line, answered by the Timelines of its requests."""
    answer_all(lambda question: uvloop.run(run(sys.argv[1], msgspec.convert(question, Workload))))


async def run(url: str, workload: Workload) -> list[Timeline]:
    """All at once, to their ends."""
    return await asyncio.gather(*(_follow(url, prompt, workload.max_tokens) for prompt in workload.prompts))


async def _follow(url: str, prompt: list[int], max_tokens: int) -> Timeline:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeline = Timeline(len(prompt), time.monotonic())
    try:
        reader = await post(url, body, lambda event: _take(timeline, event))
        await reader.ended
    except (HttpFailed, OSError) as error:
        timeline.error = str(error)
    return timeline


def _take(timeline: Timeline, event: bytes) -> None:
    """A piece counts for one token, and the last for those of which there was no text; how many there were the usage says."""
    if event.startswith(b'data: {"error"'):
        timeline.error = event.decode()
    elif b'"choices":[]' in event:
        said = msgspec.json.decode(event.removeprefix(b"data: "))["usage"]["completion_tokens"]
        at, count = timeline.arrivals.pop() if timeline.arrivals else (time.monotonic(), 1)
        timeline.arrivals.append((at, count + said - len(timeline.arrivals) - 1))
    elif b'"text":' in event and b'"text":""' not in event:
        timeline.arrivals.append((time.monotonic(), 1))


if __name__ == "__main__":
    main()
