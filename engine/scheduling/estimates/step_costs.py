"""What a step costs the device, learned from the steps that have landed."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from statistics import median_low

REMEMBERED = 7
"""Steps of a size that its cost is the median of: three that stalled in a row change nothing."""
TRUSTED = 3
"""Steps of a size after which its cost corrects those of others, as one of them may have been the
first or a stalled one."""
FORGOTTEN_AFTER = 1000
"""Steps after which a size that was not used is forgotten, and passes are. It may have been given
up for a cost that it had on a busy machine."""
GROWTH = 2
"""Sizes that were never used have a cost up to so many times the tokens of one that was."""


class StepCosts:
    """Seconds of a step by its number of tokens, which the device pads to one of ``sizes``, and by
    how often a draft model runs in it.

    The cost of a size that was used is a median. Between sizes costs are on a line, and beyond
    them on that of the next two, as a step is a fixed part (reading the weights) and one for each
    token. A step costs no less than a smaller one, and a token in it no more: where what is
    remembered of two sizes contradicts that, the one that was used last is believed.

    A pass of a draft model costs the median of what decoding steps with passes took beyond one of
    their size without. Where nothing is known of that size, it is taken to cost what the largest
    known one does: reading the weights. Steps with prompts, too, teach what their size costs, unless
    their passes alone are believed to take longer: then they teach what those cost.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = sorted(sizes)
        self._seconds: dict[int, deque[float]] = {}
        """By size, of its last steps."""
        self._medians: dict[int, float] = {}
        """By size, of these."""
        self._used_at: dict[int, int] = {}
        """By size, the number of the last step that had it."""
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []
        """Sizes that were used and their costs, ascending; empty when they are to be made anew."""
        self._believed: dict[int, float | None] = {}
        """By size, what ``seconds`` has made of them."""
        self._passes: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds of a pass, of the last steps with such."""
        self._pass_seconds: float | None = None
        """What a pass costs."""
        self._without_passes = 0
        """Steps since the last of these."""

    def learn(self, num_tokens: int, seconds: float, passes: int = 0, *, has_prompts: bool = False) -> None:
        """A step of so many tokens, and so many passes of a draft model, took so long, which may be
        more than the device's own time."""
        drafting = self.drafting_seconds(passes)
        if passes and (not has_prompts or (drafting is not None and seconds <= drafting)):
            self._passes.append((seconds - self._at_least(num_tokens)) / passes)
            self._pass_seconds = max(0.0, median_low(self._passes))
            self._without_passes = 0
            return
        if drafting is None:
            return
        seconds -= drafting
        self._without_passes += 1
        if self._without_passes >= FORGOTTEN_AFTER:
            self._passes.clear()
            self._pass_seconds = None
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        self._num_steps += 1
        self._used_at[size] = self._num_steps
        self._seconds.setdefault(size, deque(maxlen=REMEMBERED)).append(seconds)
        self._medians[size] = median_low(self._seconds[size])
        self._known, self._believed = [], {}
        if len(self._seconds[size]) >= TRUSTED:
            self._believed[size] = self._medians[size]  # no other size is believed more: no table for it alone

    def seconds(self, num_tokens: int, passes: int = 0) -> float | None:
        """What a step of so many tokens and passes costs; None if nobody knows: of more tokens than
        GROWTH times those of any step, unless there are passes, and of passes before the first."""
        if passes:
            drafting = self.drafting_seconds(passes)
            return None if drafting is None else self._at_least(num_tokens) + drafting
        index = bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        if size not in self._believed:
            known = self._costs()
            self._believed[size] = _on_line(known, size) if known and size <= GROWTH * known[-1][0] else None
        return self._believed[size]

    def drafting_seconds(self, passes: int) -> float | None:
        """What so many passes of a draft model cost; None before the first."""
        if not passes:
            return 0.0
        return None if self._pass_seconds is None else passes * self._pass_seconds

    def _at_least(self, num_tokens: int) -> float:
        """What a step of so many tokens without passes costs, or the largest that is known; 0 if
        none is."""
        cost = self.seconds(num_tokens)
        if cost is not None:
            return cost
        known = self._costs()
        return known[-1][1] if known else 0.0

    def most_tokens(self, seconds: float) -> int:
        """The most tokens of a step that costs no more, which fill its size; 0 if there is none."""
        known = self._costs()
        end = bisect_right(self._sizes, GROWTH * known[-1][0]) if known else 0
        count = bisect_right(self._sizes, seconds, hi=end, key=lambda size: _on_line(known, size))
        return self._sizes[count - 1] if count else 0

    def least_tokens(self, most: int, loss: float) -> int:
        """The fewest tokens of a step in which one costs at most ``loss`` more than in one of ``most``,
        as a part of that; ``most`` while nobody knows what that costs."""
        cost = self.seconds(most)
        if not cost:
            return most
        known, limit = self._costs(), (1 + loss) * cost / most
        return next(size for size in [*self._sizes, most] if size >= most or _on_line(known, size) <= limit * size)

    def _costs(self) -> list[tuple[int, float]]:
        """Sizes and costs of ``_known``."""
        if not self._known:
            self._forget()
            for size in sorted(self._seconds, key=self._trust, reverse=True):
                cost = self._medians[size]
                index = bisect_left(self._known, (size,))
                if index < len(self._known):
                    larger, most = self._known[index]
                    cost = min(max(cost, most * size / larger), most)
                if index:
                    smaller, least = self._known[index - 1]
                    cost = min(max(cost, least), least * size / smaller)
                self._known.insert(index, (size, cost))
        return self._known

    def _trust(self, size: int) -> tuple[bool, int]:
        """The greater, the more it is believed beside other sizes."""
        return len(self._seconds[size]) >= TRUSTED, self._used_at[size]

    def _forget(self) -> None:
        """Forget what was not used for long, but not the smallest: costs beyond two sizes are guessed."""
        old = [size for size, at in self._used_at.items() if self._num_steps - at >= FORGOTTEN_AFTER]
        for size in old:
            if size != min(self._seconds):
                del self._used_at[size], self._seconds[size], self._medians[size]


def sizes_up_to(most: int) -> list[int]:
    """Sizes of steps of up to ``most`` tokens, {2, 3} x 2^k, for whoever knows of no others."""
    powers = [2**power for power in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power) if size < most} | {most})


def _on_line(known: list[tuple[int, float]], size: int) -> float:
    """The cost of a size: its own, or on the line of two that are known, or of one and nothing at all."""
    place = bisect_left(known, (size,))
    if place < len(known) and known[place][0] == size:
        return known[place][1]
    if len(known) == 1:
        ((only, cost),) = known
        return cost * size / only
    index = min(max(place - 1, 0), len(known) - 2)
    (low, least), (high, most) = known[index : index + 2]
    return least + (most - least) * (size - low) / (high - low)
