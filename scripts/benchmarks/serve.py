"""Serving: decode while all decode, 16 streams, and what streaming costs. Ours and others take turns, A B A B."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import psutil

from ipc.benchmark.timeline import Timeline, percentile
from scripts.benchmarks.clients.latencies import itls, ttfts
from scripts.benchmarks.clients.rates import decode_rate, throughput
from scripts.benchmarks.clients.workload import Prompts, System, Workload, timelines_of
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.limits import Limits
from scripts.benchmarks.models import Size
from scripts.benchmarks.peers.systems import Ours

PROMPT, OUTPUT = 128, 128
AT_ONCE = (1, 8, 32)
LASTING = 8
"""Tokens out for each row, so that the first still decodes when the last one begins to."""
STREAMS = 16
IDLE_PERCENT = 5
"""Of all cores, below which a machine is idle, over so many seconds."""
IDLE_INTERVAL, IDLE_SECONDS = 0.2, 10.0

Runs = dict[str, list[list[Timeline]]]
"""By system, the timelines of each repetition."""
MeasureLimits = Callable[[], Limits]


def measure_serve(
    model: str, size: Size, prompts: Prompts, ours: Ours, others: Sequence[System], limits: MeasureLimits, repeats: int
) -> Iterator[Figure]:
    """The figures of one model, as they come."""
    systems = [ours, *others]
    for rows in AT_ONCE:
        workload = partial(_workload, prompts, rows, output=max(OUTPUT, LASTING * rows))
        runs, beside = take_turns_beside(limits, systems, workload, repeats)
        rate = {system: _decode_rates(repetitions) for system, repetitions in runs.items()}
        limit = median(one.decode_rate(size, rows) for one in beside)
        yield _figure(model, f"decode, {rows} at once", "tok/s", rate, limit=limit)
    runs = take_turns(systems, partial(_workload, prompts, STREAMS), repeats)
    yield _figure(model, f"{STREAMS} streams", "tok/s", _of(runs, throughput))
    for name, values in (("TTFT", ttfts), ("ITL", itls)):
        for percent in (50, 99):
            figures = {
                system: [percentile(values(run), percent) for run in repetitions]
                for system, repetitions in runs.items()
            }
            yield _figure(model, f"{STREAMS} streams, {name} p{percent}", "ms", figures, more_is_better=False)
    yield _cost_of_streaming(model, ours, prompts, repeats)


def measure_status(model: str, ours: Ours) -> Iterator[Figure]:
    """What the daemon says of itself when all is done."""
    status = ours.status()
    gap = MILLISECONDS * status["step_gap_seconds_sum"] / max(1, status["step_gap_seconds_count"])
    yield figure(f"daemon {model}", "mean gap between steps", "ms", [gap], more_is_better=False)
    compilations = status["compilations_after_ready"]
    yield figure(f"daemon {model}", "compilations after ready", "", [compilations], more_is_better=False)


def take_turns(
    systems: Sequence[System],
    workload: Callable[[], Workload],
    repeats: int,
    first: Callable[[], object] = lambda: None,
) -> Runs:
    """Run new workloads on each system in turn, after a short one each that isn't counted.

    A turn begins when the machine is idle: the threads of the one before may wait in loops for a
    while after its last token. ``first`` is called before each repetition.
    """
    for system in systems:
        asked = workload()
        system.run(Workload(asked.prompts, min(4, asked.max_tokens)))
    runs: Runs = {system.name: [] for system in systems}
    for _ in range(repeats):
        first()
        for system in systems:
            asked = workload()
            _wait_until_idle()
            runs[system.name].append(timelines_of(system, asked))
    return runs


def take_turns_beside(
    limits: MeasureLimits, systems: Sequence[System], workload: Callable[[], Workload], repeats: int
) -> tuple[Runs, list[Limits]]:
    """With the idle machine's limits before each repetition: what a shared one can do changes within minutes."""
    beside: list[Limits] = []

    def look() -> None:
        _wait_until_idle()
        beside.append(limits())

    return take_turns(systems, workload, repeats, look), beside


def _wait_until_idle() -> None:
    """Or for IDLE_SECONDS, on a machine that never is."""
    until = time.monotonic() + IDLE_SECONDS
    while psutil.cpu_percent(IDLE_INTERVAL) > IDLE_PERCENT and time.monotonic() < until:
        pass


def _workload(prompts: Prompts, rows: int, *, output: int = OUTPUT, stream: bool = True) -> Workload:
    return Workload(prompts.take(rows, PROMPT), output, stream=stream)


def _cost_of_streaming(model: str, ours: Ours, prompts: Prompts, repeats: int) -> Figure:
    """Throughput with and without, in turns."""
    streamed: list[float] = []
    whole: list[float] = []
    for _ in range(repeats):
        for stream, rates in ((True, streamed), (False, whole)):
            rates.append(throughput(timelines_of(ours, _workload(prompts, STREAMS, stream=stream))))
    kept = [100 * with_it / without for with_it, without in zip(streamed, whole, strict=True)]
    return figure(f"serve {model}", f"{STREAMS} streams, of unstreamed tok/s", "%", kept)


def _figure(
    model: str,
    name: str,
    unit: str,
    runs: dict[str, list[float]],
    *,
    more_is_better: bool = True,
    limit: float | None = None,
) -> Figure:
    others = {system: values for system, values in runs.items() if system != Ours.name}
    return figure(
        f"serve {model}", name, unit, runs[Ours.name], more_is_better=more_is_better, others=others, limit=limit
    )


def _decode_rates(repetitions: list[list[Timeline]]) -> list[float]:
    """Of those in which all decode at once, as long as there is one: of some servers an answer comes as a whole now and
    then. Raises ValueError if there is none."""
    rates, never = [], ValueError("there are no repetitions")
    for run in repetitions:
        try:
            rates.append(decode_rate(run))
        except ValueError as error:
            never = error
    if not rates:
        raise never
    return rates


def _of(runs: Runs, figure_of: Callable[[list[Timeline]], float]) -> dict[str, list[float]]:
    return {system: [figure_of(run) for run in repetitions] for system, repetitions in runs.items()}
