"""Structured outputs: what one row that follows a schema costs the others of its batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ipc.benchmark.timeline import Timeline, percentile
from scripts.benchmarks.clients.rates import decode_rate
from scripts.benchmarks.clients.workload import Prompts, System, Workload, timelines_of
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure

NEIGHBOURS = 63
PROMPT, OUTPUT = 32, 128
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b", "c"]}},
    "required": ["name", "age"],
}
FORM: dict[str, Any] = {"json": {"type": "array", "items": PERSON, "minItems": 1000}}
"""More people than there are tokens, so that it never ends by itself."""


def measure_grammar(model: str, prompts: Prompts, many: System, one: System, repeats: int) -> Iterator[Figure]:
    """63 rows that decode beside one with a schema and beside one without, in turns; two clients of one daemon."""
    _together(prompts, many, one, FORM)
    runs = [[_together(prompts, many, one, form) for form in (None, FORM)] for _ in range(repeats)]
    rates = [[decode_rate(neighbours) for neighbours, _ in run] for run in runs]
    name, beside = f"grammar {model}", f"{NEIGHBOURS} rows beside one with a schema"
    yield figure(name, beside, "tok/s", [with_it for _, with_it in rates])
    yield figure(name, f"{beside}, of beside one without", "%", [100 * with_it / without for without, with_it in rates])
    shares = [[100 * _share(neighbours, row) for neighbours, row in run] for run in runs]
    yield figure(name, "tokens of the row with a schema, of a neighbour's meanwhile", "%", [one for _, one in shares])
    for form, label in enumerate(("without", "with")):
        gaps = [MILLISECONDS * percentile(run[form][1].itls, 50) for run in runs]
        yield figure(name, f"the row {label} a schema, ITL p50", "ms", gaps, more_is_better=False)


def _share(neighbours: list[Timeline], row: Timeline) -> float:
    """Tokens that the row is given while all decode, in those of a neighbour on average."""
    begin = max(timeline.first_at for timeline in (*neighbours, row))
    end = min(timeline.last_at for timeline in (*neighbours, row))
    counts = [sum(count for at, count in each.arrivals if begin < at <= end) for each in (row, *neighbours)]
    return counts[0] / (sum(counts[1:]) / len(neighbours))


def _together(
    prompts: Prompts, many: System, one: System, form: dict[str, Any] | None
) -> tuple[list[Timeline], Timeline]:
    """The timelines of the neighbours, and that of the row which may have a form."""
    asked = Workload(prompts.take(NEIGHBOURS, PROMPT), OUTPUT)
    formed = Workload(prompts.take(1, PROMPT), OUTPUT, structured_outputs=form)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(timelines_of, one, formed)
        return timelines_of(many, asked), answer.result()[0]
