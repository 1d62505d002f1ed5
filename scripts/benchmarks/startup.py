"""How long a daemon takes from its process's first moment to READY, with an empty compilation cache and a full one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.processes.daemon import Daemon

STAGES = ("imports", "loading weights", "compiling", "pages and warm-up")
OURS = ("imports", "loading weights", "pages and warm-up")
"""What is left where nothing needs to be compiled. Imports are all there is until the first weights are read."""


def measure_startup(model: str, directory: Path, settings: list[str], repeats: int) -> Iterator[Figure]:
    """One cold start, and then warm ones; the weights are in the page cache of the system in any case."""
    with tempfile.TemporaryDirectory(prefix="odriver-bench-xla-") as cache:
        cold = _start(directory, settings, cache)
        compiled = _entries(cache)
        warm = [_start(directory, settings, cache) for _ in range(repeats)]
        added = _entries(cache) - compiled
    yield from _figures(f"startup {model}", "cold", [cold])
    yield from _figures(f"startup {model}", "warm", warm)
    ours = [sum(start.seconds_of(stage) for stage in OURS) for start in warm]
    yield figure(f"startup {model}", f"warm, {', '.join(OURS)}", "s", ours, more_is_better=False)
    yield figure(f"startup {model}", "warm, functions compiled anew", "", [added], more_is_better=False)


def _start(directory: Path, settings: list[str], cache: str) -> Daemon:
    # as a service has it: a shell that forbids bytecode has every start compile oDriver's modules
    environment = {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": ""}
    with Daemon(directory, *settings, environment=environment) as daemon:
        return daemon


def _entries(cache: str) -> int:
    return sum(entry.name.endswith("-cache") for entry in Path(cache).iterdir())


def _figures(benchmark: str, kind: str, starts: list[Daemon]) -> Iterator[Figure]:
    seconds = [start.seconds_to_ready for start in starts]
    yield figure(benchmark, f"{kind} start to READY", "s", seconds, more_is_better=False)
    for stage in STAGES:
        seconds = [start.seconds_of(stage) for start in starts]
        yield figure(benchmark, f"{kind}, {stage}", "s", seconds, more_is_better=False)
