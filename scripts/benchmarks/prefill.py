"""Prefill: how fast a lone prompt is read, by the time to its first token."""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

from scripts.benchmarks.clients.workload import Prompts, System, Workload
from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.models import Size
from scripts.benchmarks.peers.systems import Ours
from scripts.benchmarks.serve import MeasureLimits, take_turns_beside

LENGTHS = (512, 2048)


def measure_prefill(
    model: str, size: Size, prompts: Prompts, ours: Ours, others: Sequence[System], limits: MeasureLimits, repeats: int
) -> Iterator[Figure]:
    """Prompt tokens a second, for each length; no prompt is sent twice."""
    for length in LENGTHS:
        workload = partial(_workload, prompts, length)
        runs, beside = take_turns_beside(limits, [ours, *others], workload, repeats)
        rates = {system: [length / run[0].ttft for run in repetitions] for system, repetitions in runs.items()}
        yield figure(
            f"prefill {model}",
            f"prefill, {length} tokens",
            "tok/s",
            rates.pop(Ours.name),
            others=rates,
            limit=median(one.prefill_rate(size, length) for one in beside),
        )


def _workload(prompts: Prompts, length: int) -> Workload:
    return Workload(prompts.take(1, length), max_tokens=1)
