"""Which pages a sequence owns, in each group of layers that has a page table of its own.

A page holds the keys and values of some tokens in as many layers as a group has. All groups have
equally many, so one pool of equal pages serves all of them (the idea is that of vLLM's hybrid
cache manager). A group keeps all tokens of a sequence, or those in a window: pages behind the
window go to whoever needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from caching.metadata import pages_for


@dataclass(frozen=True)
class CacheGroups:
    """The arithmetic of pages of one sequence. A window of n tokens counts a query's own."""

    page_size: int
    """Tokens in a page."""
    windows: tuple[int | None, ...] = (None,)
    """By group, how many tokens are kept; None is all."""
    step_tokens: int = 1
    """The most tokens of a sequence that a step computes."""

    @cached_property
    def full(self) -> list[int]:
        """The groups that keep all tokens."""
        return [group for group, window in enumerate(self.windows) if window is None]

    @cached_property
    def windowed(self) -> list[int]:
        """The other groups."""
        return [group for group, window in enumerate(self.windows) if window is not None]

    @cached_property
    def behind(self) -> list[int]:
        """By group, the pages that a window keeps behind the page of its query; 0 without one."""
        return [pages_for((window or 1) - 1, self.page_size) for window in self.windows]

    @cached_property
    def most(self) -> list[int]:
        """By group, the most pages that a window and one step need; 0 without a window."""
        step = pages_for(self.step_tokens - 1, self.page_size)
        return [
            0 if window is None else behind + 1 + step for window, behind in zip(self.windows, self.behind, strict=True)
        ]

    def span(self, group: int, start: int, num_pages: int) -> tuple[int, int]:
        """The first page that is owned while a step begins at token ``start``, and the one behind
        the last, of ``num_pages`` that all known tokens fill."""
        if self.windows[group] is None:
            return 0, num_pages
        first = max(0, start // self.page_size - self.behind[group])
        return first, min(num_pages, first + self.most[group])

    def pages_from(self, start: int, num_tokens: int) -> int:
        """Pages owned in all groups by ``num_tokens`` while a step begins at token ``start``."""
        num_pages = pages_for(num_tokens, self.page_size)
        count = len(self.full) * num_pages
        for group in self.windowed:
            first, past = self.span(group, start, num_pages)
            count += past - first
        return count

    def pages_of(self, num_tokens: int) -> int:
        """The most pages that a sequence of ``num_tokens`` ever owns at once."""
        return self.pages_from(0, num_tokens)

    def tokens_in(self, num_pages: int, longest: int) -> int:
        """The longest sequence, of at most ``longest`` tokens, that so many pages hold."""
        low, high = 0, pages_for(longest, self.page_size)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pages_of(middle * self.page_size) <= num_pages else (low, middle - 1)
        return min(longest, low * self.page_size)

    def hit(self, held: int, is_kept: Callable[[int, int], bool]) -> int:
        """The longest prefix hit of at most ``held`` pages: a window has all its pages at its end.

        ``is_kept(page, group)`` is whether the prefix cache has a page.
        """
        before = -1
        while held != before:
            before = held
            for group in self.windowed:
                page = held
                while page > max(0, held - self.behind[group]):
                    page -= 1
                    held = held if is_kept(page, group) else page
        return held

    def ends_are_kept(self, hit: int, is_kept: Callable[[int, int], bool]) -> bool:
        """Whether the first and the last page of each window behind a hit of so many pages are kept: whether all are,
        nearly always. ``is_kept`` is as in ``hit``."""
        for group in self.windowed:
            first = max(0, hit - self.behind[group])
            if first < hit and not (is_kept(first, group) and is_kept(hit - 1, group)):
                return False
        return True

    def growth(self, num_tokens: int, more: int) -> int:
        """Tokens, in each group counted anew, for which ``num_tokens`` need pages when ``more``
        are generated."""
        growth = len(self.full) * more
        for group in self.windowed:
            growth += min(more, max(0, (self.behind[group] + 1) * self.page_size - num_tokens))
        return growth
