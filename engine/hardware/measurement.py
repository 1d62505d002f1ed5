"""One finding about the hardware, and the way to time a computation."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import msgspec

logger = logging.getLogger(__name__)

REPEATS = 5
"""Times that a computation is timed; the shortest counts."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. ``expected`` is the specification's, the plan's or another limit's number."""

    section: str
    what: str
    value: float | None = None
    unit: str = ""
    expected: float | None = None
    state: str = "measured"
    """measured, good, bad, or "not measured"."""
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """How large the arrays are: an accelerator's rates show in large ones alone."""

    large_bytes: int
    matrix: int
    """Rows and columns of the matrices that are multiplied."""
    rows: int
    tokens: int
    """Sequences of the decoding steps, and tokens that each has."""


FULL = Scale(large_bytes=2**30, matrix=8192, rows=64, tokens=1024)
SMALL = Scale(large_bytes=2**25, matrix=512, rows=8, tokens=64)


def scale_here() -> Scale:
    """FULL on accelerators, SMALL on CPUs."""
    return SMALL if jax.default_backend() == "cpu" else FULL


def attempted(section: str, measurements: Callable[[], Iterable[Measurement]]) -> Iterator[Measurement]:
    """The measurements; an error ends them with one that quotes it, and the report goes on."""
    try:
        yield from measurements()
    except Exception as error:  # on hardware that nobody has tried anything may fail
        logger.debug("%s could not be measured to the end", section, exc_info=True)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Measurement(section=section, what="the rest", state="not measured", note=why)


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The shortest time of a call that has been compiled, until its results are there."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begun)
    return min(times)
