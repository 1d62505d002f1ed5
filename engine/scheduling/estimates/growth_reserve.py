"""Pages to keep free at admission, so that running sequences grow without preempting others."""

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

WATERMARK = 0.01
"""Share of the pool that is kept free whatever is expected."""
LEAST = 0.1
"""Share of the expected growth that is reserved at least: sequences do not all reach their end
at the same time."""
STEP_UP = 0.2
"""What a preemption for pages adds to that share: the expectation was wrong."""
STEPS_DOWN = 600
"""Steps after which a share of one would be back at zero, if all goes well. SGLang's figure for
the same purpose."""
LONGEST = 4096
"""Tokens that one sequence is expected to generate yet, at most: SGLang's figure too."""
REMEMBERED = 256
"""Lengths of outputs that the expectation is made from: those seen last."""
PRIOR = tuple(2**power for power in range(6, 13))
"""What they are before any has been seen: any order of magnitude is as likely as the next."""


class GrowthReserve:
    """Expects a sequence to become as long as recent ones on average that had got as far.

    ``max_tokens`` alone says little, as most requests leave it out and end long before the context
    does. Of the growth expected of all, a share is reserved: more after each preemption for pages,
    and less as time goes by. With a share of one hardly any sequence is preempted, and much of the
    pool lies idle; with none, a burst of short prompts is admitted whose outputs do not fit, and
    they preempt each other time and again.
    """

    def __init__(self, num_pages: int, *, watermark: float = WATERMARK, least: float = LEAST) -> None:
        self._watermark = max(1, int(num_pages * watermark)) if watermark else 0
        self._least = least
        self._share = least
        self._lengths = deque(PRIOR)
        self._sorted = list(PRIOR)
        self._longer: list[int] = []
        """Sums of ``_sorted`` from each place on; made when they are asked for."""

    def growth(self, num_output_tokens: int, max_tokens: int) -> int:
        """Tokens that a sequence is expected to generate yet, of ``max_tokens`` that it may."""
        if not self._longer:
            self._longer = list(accumulate(reversed(self._sorted)))[::-1]
        shorter = bisect_right(self._sorted, num_output_tokens)
        longer = len(self._sorted) - shorter
        # A sequence that is longer than all that were seen is expected to become twice as long.
        more = self._longer[shorter] // longer - num_output_tokens if longer else num_output_tokens
        return min(more, LONGEST, max_tokens - num_output_tokens)

    def learn(self, num_output_tokens: int) -> None:
        """A sequence has ended with so many tokens, by itself or not: its pages are free."""
        if len(self._lengths) == REMEMBERED:
            oldest = self._lengths.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._lengths.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        self._longer = []

    def pages(self, growth: int, num_tables: int, page_size: int) -> int:
        """Pages to keep free where so many page tables, each in the midst of a page, are to hold
        ``growth`` more tokens."""
        return self._watermark + int(self._share * (growth + num_tables * (page_size - 1))) // page_size

    def tighten(self) -> None:
        """A sequence was preempted for pages."""
        self._share = min(1.0, self._share + STEP_UP)

    def relax(self) -> None:
        """A step was planned."""
        self._share = max(self._least, self._share - 1 / STEPS_DOWN)
