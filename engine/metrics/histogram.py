"""A histogram that costs a bisection a value."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate


class Histogram:
    """Counts values by bucket, for a bisection each. One thread writes, any may read."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """By bucket; a bucket has the values up to its bound, and the last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, infinity last, with the number of values up to it."""
        return list(zip((*self.bounds, float("inf")), accumulate(list(self.counts)), strict=True))
