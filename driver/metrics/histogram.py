"""A histogram that is cheap to observe into: a bisection and two additions."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts values by bucket, of those at most as large as each bound. One thread observes, any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """By bucket; the last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """As Prometheus has it: each bound, and how many values are at most that; infinity is the last."""
        return list(zip((*self.bounds, float("inf")), accumulate(list(self.counts)), strict=True))
