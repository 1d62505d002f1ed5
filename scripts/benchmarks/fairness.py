"""One client floods the daemon with long prompts; what does another one feel, that sends a short one now and then?"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ipc.benchmark.timeline import percentile
from scripts.benchmarks.clients.latencies import ttfts
from scripts.benchmarks.clients.workload import Prompts, System, Workload, timelines_of
from scripts.benchmarks.figures.figure import Figure, figure

FLOOD, LONG_PROMPT, LONG_OUTPUT = 500, 900, 16
"""Of the shipped settings one client may have no more than 512 requests that wait."""
PROBES, SHORT_PROMPT, SHORT_OUTPUT = 400, 16, 8
INTERVAL = 0.1
"""Seconds between two of the short ones."""


def measure_fairness(
    name: str, prompts: Prompts, flooding: System, other: System, *, flood: int = FLOOD, probes: int = PROBES
) -> Iterator[Figure]:
    """The other's time to first token beside the flood and alone, and how many times longer it is."""
    probe = lambda: Workload(prompts.take(probes, SHORT_PROMPT), SHORT_OUTPUT, interval=INTERVAL)  # noqa: E731
    timelines_of(other, Workload(prompts.take(4, SHORT_PROMPT), SHORT_OUTPUT))  # not counted
    alone = ttfts(timelines_of(other, probe()))
    with ThreadPoolExecutor(1) as background:
        water = background.submit(timelines_of, flooding, Workload(prompts.take(flood, LONG_PROMPT), LONG_OUTPUT))
        answers = timelines_of(other, probe())
        flooded = water.result()
    ends = max(timeline.last_at for timeline in flooded)
    beside = ttfts([timeline for timeline in answers if timeline.sent_at < ends])
    group = f"fairness, {name}"
    yield figure(group, "short ones sent beside the flood", "", [len(beside)])
    for percent in (50, 99):
        ours, theirs = percentile(beside, percent), percentile(alone, percent)
        yield figure(group, f"TTFT p{percent}", "ms", [ours], more_is_better=False, others={"alone": [theirs]})
        yield figure(group, f"TTFT p{percent}, times that of alone", "", [ours / theirs], more_is_better=False)
    seconds = ends - min(timeline.sent_at for timeline in flooded)
    yield figure(group, "the flood's prompts", "tok/s", [flood * LONG_PROMPT / seconds])
    yield figure(group, "the flood's TTFT p50", "ms", [percentile(ttfts(flooded), 50)], more_is_better=False)
