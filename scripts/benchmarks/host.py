"""The host's share of a step: what is left of it when the model is nothing."""

from collections.abc import Iterator

from ipc.timeline import percentile
from scripts.benchmarks.child import Child
from scripts.benchmarks.figure import Figure, figure

NULL_MODEL = "scripts.benchmarks.null_model"
ROWS = (1, 8, 64, 256)
WAITING = (10, 1000, 10000)
STEPS = 300
MILLISECONDS = 1000


def measure_host(repeats: int) -> Iterator[Figure]:
    """Milliseconds a step: the median of a bare loop's for each count of waiting requests, and through the driver."""
    with Child(NULL_MODEL) as child:
        for rows in ROWS:
            for waiting in WAITING:
                question = {"rows": rows, "waiting": waiting, "steps": STEPS}
                runs = [child.ask(question) for _ in range(repeats)]
                name = f"{_rows(rows)}, {waiting:,} waiting"
                for percent in (50, 99):
                    values = [MILLISECONDS * percentile(run, percent) for run in runs]
                    yield figure("host", f"{name}, p{percent}", "ms", values, more_is_better=False)
            values = [MILLISECONDS * child.ask({"rows": rows, "steps": STEPS})[0] for _ in range(repeats)]
            yield figure("host", f"{_rows(rows)}, driver threads and text, mean", "ms", values, more_is_better=False)


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"
