"""What a planned step costs the host while many wait: the scheduler alone, 64 rows, requests that end and are followed."""

import gc
import itertools
import time
from collections.abc import Iterator

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from scripts.benchmarks.figures.figure import MICROSECONDS, Figure, figure

WAITING = (100, 1_000, 10_000, 100_000)
ROWS, PAGE_SIZE, BUDGET, PAGES = 64, 16, 512, 4096
PROMPT, OUTPUT, CLIENTS = 128, 64, 50
STEPS = 2000


def measure_plan_cost(repeats: int) -> Iterator[Figure]:
    """Microseconds of ``plan``, ``update`` and the ``add`` of whoever follows, on average over STEPS steps."""
    for waiting in WAITING:
        runs = [MICROSECONDS * seconds_per_step(waiting, STEPS) for _ in range(repeats)]
        yield figure("host time of a step", f"{waiting:,} waiting", "us", runs, more_is_better=False)


def seconds_per_step(waiting: int, steps: int) -> float:
    """Seconds a step once all rows decode. Every sequence that ends is followed by one that comes."""
    scheduler = InferenceScheduler(
        SequenceMemory(HBMPageManager(PAGES), CacheGroups(PAGE_SIZE)), max_num_seqs=ROWS, max_num_batched_tokens=BUDGET
    )
    sequences = _sequences()
    for sequence in itertools.islice(sequences, ROWS + waiting):
        scheduler.add(sequence)
    for _ in range(ROWS * PROMPT // BUDGET + OUTPUT):
        _step(scheduler, sequences)
    gc.collect()  # and not in the midst of it, with 100,000 sequences to look at
    gc.freeze()
    began = time.perf_counter()
    for _ in range(steps):
        _step(scheduler, sequences)
    seconds = (time.perf_counter() - began) / steps
    gc.unfreeze()
    return seconds


def _step(scheduler: InferenceScheduler, sequences: Iterator[Sequence]) -> None:
    plan = scheduler.plan()
    assert plan is not None, "somebody waits always"
    for output in scheduler.update(plan, StepResult([[1] * samples for samples in plan.samples])):
        if output.finish_reason is not None:
            scheduler.add(next(sequences))


def _sequences() -> Iterator[Sequence]:
    """Without end, of 50 clients in turns."""
    params, prompt = SamplingParams(temperature=0), [1] * PROMPT
    for number in itertools.count():
        length = OUTPUT // 2 + number % OUTPUT
        yield Sequence(
            str(number),
            prompt,
            params,
            frozenset(),
            length,
            seed=0,
            client=str(number % CLIENTS),
            salt=number.to_bytes(8),
        )
