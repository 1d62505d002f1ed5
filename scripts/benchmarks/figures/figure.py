"""What was measured: a median beside its limit and beside what others do."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

MILLISECONDS = 1000
"""In a second."""
MICROSECONDS = 10**6


class MeasurementFailed(Exception):
    """There are no figures, or none that count; the message says why."""


class Figure(msgspec.Struct, kw_only=True):
    """One cell of the tables."""

    benchmark: str
    """The group it is shown in, such as "serve small"."""
    name: str
    unit: str
    runs: list[float]
    """What each repetition gave."""
    value: float
    """Their median."""
    more_is_better: bool = True
    others: dict[str, float] = {}
    """What others gave, by name."""
    ratios: dict[str, float] = {}
    """How many times better than each of them this is: 2 is twice the rate or half the time."""
    limit: float | None = None
    """What the machine allows, in the same unit."""
    share: float | None = None
    """``value`` of ``limit``."""


def figure(
    benchmark: str,
    name: str,
    unit: str,
    runs: Sequence[float],
    *,
    more_is_better: bool = True,
    others: Mapping[str, Sequence[float]] | None = None,
    limit: float | None = None,
) -> Figure:
    """The figure that repetitions of ours and of others give."""
    value = median(runs)
    medians = {other: median(theirs) for other, theirs in (others or {}).items()}
    return Figure(
        benchmark=benchmark,
        name=name,
        unit=unit,
        runs=list(runs),
        value=value,
        more_is_better=more_is_better,
        others=medians,
        ratios={other: ratio(value, theirs, more_is_better) for other, theirs in medians.items()},
        limit=limit,
        share=None if limit is None else ratio(value, limit, more_is_better),
    )


def ratio(ours: float, theirs: float, more_is_better: bool) -> float:
    """How many times better ours is: 1 where they are equal, and otherwise infinite where the worse is nothing."""
    if ours == theirs:
        return 1.0
    better, worse = (ours, theirs) if more_is_better else (theirs, ours)
    return better / worse if worse else float("inf")
