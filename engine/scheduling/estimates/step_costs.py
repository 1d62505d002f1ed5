"""What a step costs the device, learned from the steps that have landed."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from statistics import median_low

REMEMBERED = 7
"""Steps of a size that its cost is the median of: three that stalled in a row change nothing."""
FORGOTTEN_AFTER = 1000
"""Steps after which a size that was not used is forgotten. It may have been given up for a cost
that it had on a busy machine."""
GROWTH = 2
"""Sizes that were never used have a cost up to so many times the tokens of one that was."""


class StepCosts:
    """Seconds of a step by its number of tokens, which the device pads to one of ``sizes``.

    The cost of a size that was used is a median. Between sizes costs are on a line, and beyond
    them on that of the next two, as a step is a fixed part (reading the weights) and one for each
    token. A size is taken to cost no less than a smaller one, and no more in proportion to its
    tokens: so steps of one size correct what is remembered of others.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = sorted(sizes)
        self._seconds: dict[int, deque[float]] = {}
        """By size, of its last steps."""
        self._used_at: dict[int, int] = {}
        """By size, the number of the last step that had it."""
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []
        """Sizes that were used and their costs, ascending; empty when they are to be made anew."""

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long, which may be more than the device's own time."""
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        self._num_steps += 1
        self._used_at[size] = self._num_steps
        self._seconds.setdefault(size, deque(maxlen=REMEMBERED)).append(seconds)
        self._known = []

    def seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens costs; None of more than GROWTH times those of any step."""
        index = bisect_left(self._sizes, num_tokens)
        known = self._costs()
        if not known or index == len(self._sizes):
            return None
        size = self._sizes[index]
        if size > GROWTH * known[-1][0]:
            return None
        return _on_line(known, size)

    def most_tokens(self, seconds: float) -> int:
        """The most tokens of a step that costs no more, which fill its size; 0 if there is none."""
        fitting = (
            size for size in reversed(self._sizes) if (cost := self.seconds(size)) is not None and cost <= seconds
        )
        return next(fitting, 0)

    def _costs(self) -> list[tuple[int, float]]:
        """Sizes and costs of ``_known``."""
        if not self._known:
            for size in [size for size, at in self._used_at.items() if self._num_steps - at >= FORGOTTEN_AFTER]:
                del self._used_at[size], self._seconds[size]
            sizes = sorted(self._seconds)
            costs = [median_low(self._seconds[size]) for size in sizes]
            for index in range(len(sizes) - 2, -1, -1):
                costs[index] = min(costs[index], costs[index + 1])
            for index in range(1, len(sizes)):
                costs[index] = min(costs[index], costs[index - 1] * sizes[index] / sizes[index - 1])
            self._known = list(zip(sizes, costs, strict=True))
        return self._known


def powers_of_two(most: int) -> list[int]:
    """Sizes of steps of up to ``most`` tokens, for whoever knows of no others."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power < most} | {most})


def _on_line(known: list[tuple[int, float]], size: int) -> float:
    """The cost of a size on the line of two that are known, or of one and nothing at all."""
    if len(known) == 1:
        ((only, cost),) = known
        return cost * size / only
    index = min(max(bisect_left(known, (size,)) - 1, 0), len(known) - 2)
    (low, least), (high, most) = known[index : index + 2]
    return least + (most - least) * (size - low) / (high - low)
