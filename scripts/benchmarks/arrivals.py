"""What streams feel of prompts that arrive beside them, and what these wait for."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ipc.benchmark.timeline import percentile
from scripts.benchmarks.clients.latencies import itls, ttfts
from scripts.benchmarks.clients.rates import throughput
from scripts.benchmarks.clients.workload import Prompts, Workload, timelines_of
from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.peers.systems import Ours

STREAMS, SHORT_PROMPT, LONG_OUTPUT = 16, 16, 384
ARRIVING, LONG_PROMPT, SHORT_OUTPUT = 16, 512, 32
PATIENCE = 60.0
"""Seconds until all streams run."""


def measure_arrivals(model: str, prompts: Prompts, streams: Ours, arriving: Ours, repeats: int) -> Iterator[Figure]:
    """The time between tokens of streams, the time to first token of prompts that come at once, and tokens/s."""
    streams.run(Workload(prompts.take(STREAMS, LONG_PROMPT), 4))  # so that the daemon has seen steps of these sizes
    all_itls: list[list[float]] = []
    all_ttfts: list[list[float]] = []
    rates: list[float] = []
    for _ in range(repeats):
        with ThreadPoolExecutor(1) as background:
            running = background.submit(
                timelines_of, streams, Workload(prompts.take(STREAMS, SHORT_PROMPT), LONG_OUTPUT)
            )
            _wait_for_streams(streams)
            answers = timelines_of(arriving, Workload(prompts.take(ARRIVING, LONG_PROMPT), SHORT_OUTPUT))
            timelines = running.result()
        all_itls.append(itls(timelines))
        all_ttfts.append(ttfts(answers))
        rates.append(throughput([*timelines, *answers]))
    group = f"{ARRIVING} prompts of {LONG_PROMPT} beside {STREAMS} streams, {model}"
    for percent in (50, 99):
        values = [percentile(run, percent) for run in all_itls]
        yield figure(group, f"ITL p{percent} of the streams", "ms", values, more_is_better=False)
    ratios = [percentile(run, 99) / percentile(run, 50) for run in all_itls]
    yield figure(group, "ITL p99, times p50", "", ratios, more_is_better=False)
    for percent in (50, 99):
        values = [percentile(run, percent) for run in all_ttfts]
        yield figure(group, f"TTFT p{percent} of the prompts", "ms", values, more_is_better=False)
    yield figure(group, "all", "tok/s", rates)


def _wait_for_streams(system: Ours) -> None:
    """Until all of them decode. Raises SystemExit if they never do."""
    deadline = time.monotonic() + PATIENCE
    with system.client() as client:
        while client.status()["running"] < STREAMS:
            if time.monotonic() > deadline:
                raise SystemExit("the streams do not run all at once")
            time.sleep(0.05)
    time.sleep(1.0)
