"""What the scheduler's policies are worth on a TPU v5e-8 that serves Llama-3-8B: simulated, with the real scheduler.

Each trace is played at several rates, once as we ship it and once without each of the policies, which stand beside it.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from ipc.benchmark.timeline import percentile
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.simulation.accelerator import Accelerator, CostModel, Transformer
from scripts.benchmarks.simulation.policies import PAGE_SIZE, POLICIES, SHIPPED, Policy
from scripts.benchmarks.simulation.simulator import Simulator
from scripts.benchmarks.simulation.traces import SHAPES, Shape, draw_trace

REQUESTS = 1_000_000
"""Of all runs together."""
TTFT_LIMIT, TPOT_LIMIT = 2.0, 0.03
"""Seconds. Who keeps both is served well: that many are the goodput."""
AT = " at "


def measure_policies(requests: int) -> Iterator[Figure]:
    """Each trace at each rate, the shipped policies beside the others, on all cores."""
    workers = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))
    with workers:
        played = [
            (shape, rate, {policy: workers.submit(play, shape, rate, count, policy) for policy in POLICIES})
            for shape in SHAPES
            for rate in shape.rates
            for count in [max(1, round(requests * shape.share / len(shape.rates) / len(POLICIES)))]
        ]
        for shape, rate, runs in played:
            results = {policy.name: run.result() for policy, run in runs.items()}
            yield from _figures(f"simulate {shape.name}{AT}{rate:g} req/s", results)


def play(shape: Shape, rate: float, count: int, policy: Policy) -> dict[tuple[str, str], float]:
    """One run: its figures by name and unit."""
    cost = CostModel(Transformer(), Accelerator())
    trace = draw_trace(shape, rate, count)
    outcome = Simulator(policy.scheduler(cost.num_pages(PAGE_SIZE)), cost.seconds, timed=policy.timed).run(trace)
    ttft, tpot = outcome.ttft(trace), outcome.tpot(trace)
    of_clients = [percentile(ttft[trace.client == client], 99) for client in np.unique(trace.client)]
    return {
        ("goodput", "%"): 100 * float(np.mean((ttft <= TTFT_LIMIT) & (tpot <= TPOT_LIMIT))),
        ("TTFT p50", "ms"): MILLISECONDS * percentile(ttft, 50),
        ("TTFT p99", "ms"): MILLISECONDS * percentile(ttft, 99),
        ("TTFT p99 of the median client", "ms"): MILLISECONDS * percentile(of_clients, 50),
        ("TPOT p50", "ms"): MILLISECONDS * percentile(tpot, 50),
        ("TPOT p99", "ms"): MILLISECONDS * percentile(tpot, 99),
        ("ITL p99", "ms"): MILLISECONDS * percentile(outcome.gaps, 99),
        ("preemptions in 1,000 requests", ""): 1000 * outcome.preemptions / count,
    }


def _figures(group: str, results: Mapping[str, Mapping[tuple[str, str], float]]) -> Iterator[Figure]:
    for (name, unit), ours in results[SHIPPED.name].items():
        others = {policy: [result[name, unit]] for policy, result in results.items() if policy != SHIPPED.name}
        yield figure(group, name, unit, [ours], more_is_better=name == "goodput", others=others)
