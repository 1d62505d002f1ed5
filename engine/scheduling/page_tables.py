"""The page tables of sequences: pages for tokens to come, and those that windows have passed."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from caching.cache_groups import CacheGroups
from caching.metadata import pages_for
from caching.page_manager import SINK_PAGE, HBMPageManager
from engine.scheduling.host_cache.host_pages import HostPages
from engine.scheduling.prefixes.prefix_hits import keys_in_group
from engine.scheduling.sequence import Sequence


class PageTables:
    """Gives sequences pages and takes them back, in a table for each of the ``groups``.

    In a group with a window, pages return as soon as no token that is still to be computed sees
    them. A prompt that was admitted never waits for pages there either: a page that others share
    takes one of the pool for each of its owners, as each will want another in its place.
    """

    def __init__(self, pages: HBMPageManager, groups: CacheGroups, host: HostPages | None) -> None:
        self._pages = pages
        self._groups = groups
        self._host = host
        self._page_size = groups.page_size
        self._num_groups, self._full, self._windowed = len(groups.windows), groups.full, groups.windowed
        self._owed = 0
        """Owners of the pages of windows beyond the first of each: pages that they may yet take."""
        self._prefilled: list[Sequence] = []
        """Those that have planned their last chunk since the last plan."""

    def begin_plan(self) -> None:
        """Take back what prompts that are computed needed beside their windows."""
        for sequence in self._prefilled:
            self._let_go(sequence)
        self._prefilled.clear()

    def can_alloc(self, count: int) -> bool:
        """Whether so many pages can be given, beside those that others may yet take."""
        return self._pages.can_alloc(count + self._owed)

    def begin(self, sequence: Sequence, held: int, copied: list[tuple[int, int]]) -> None:
        """Share a prefix hit of ``held`` pages, and allocate for what is behind it.

        The pages ``copied``, each a group and a number, are the host's: they come from there.
        """
        num_pages, start = pages_for(sequence.num_tokens, self._page_size), held * self._page_size
        spans = [self._groups.span(group, start, num_pages) for group in range(self._num_groups)]
        for group, (first, _) in enumerate(spans):
            absent = {page for its_group, page in copied if its_group == group}
            there = [page for page in range(first, held) if page not in absent]
            table = [SINK_PAGE] * max(first, held)
            for page, shared in zip(
                there, self._share([sequence.page_keys[page] for page in there], group), strict=True
            ):
                table[page] = shared
            sequence.pages.append(table)
            sequence.first_pages.append(first)
        if self._host is not None and copied:
            self._load(self._host, sequence, copied)
        for table, (_, past) in zip(sequence.pages, spans, strict=True):
            table += self._pages.alloc(past - len(table))
        sequence.num_computed_tokens = start
        sequence.num_paged_tokens = num_pages * self._page_size

    def grow(self, sequence: Sequence) -> bool:
        """Give it pages for one more page of tokens; False if too few are free or cached."""
        if self._windowed:
            self._let_go(sequence)
        if not self.can_alloc(self._num_groups):
            return False
        for table in sequence.pages:
            table += self._pages.alloc(1)
        sequence.num_paged_tokens += self._page_size
        return True

    def computed(self, sequence: Sequence, end: int) -> None:
        """Known tokens up to ``end`` are planned: move the windows of a prompt on to its next chunk."""
        if not self._windowed:
            return
        self._let_go(sequence)
        num_pages = sequence.num_paged_tokens // self._page_size
        for group in self._windowed:
            _, past = self._groups.span(group, sequence.num_computed_tokens, num_pages)
            table = sequence.pages[group]
            if past > len(table):
                table += self._pages.alloc(past - len(table))
        if end == sequence.num_prefill_tokens:
            self._prefilled.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take all of its pages back."""
        for group, table in enumerate(sequence.pages):
            self._free(group, reversed(table[sequence.first_pages[group] :]))
        sequence.pages, sequence.first_pages = [], []

    def num_exclusive(self, sequences: Iterable[Sequence]) -> int:
        """Pages that would come free if these sequences were released."""
        sequences = list(sequences)
        windows = sum(
            len(sequence.pages[group]) - sequence.first_pages[group]
            for sequence in sequences
            for group in self._windowed
        )
        full = (sequence.pages[group] for sequence in sequences for group in self._full)
        return windows + self._pages.num_exclusive(chain.from_iterable(full))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that running sequences own their pages, and can have what they may yet take."""
        owned: list[int] = []
        in_windows: Counter[int] = Counter()
        for sequence in running:
            for group, (table, first) in enumerate(zip(sequence.pages, sequence.first_pages, strict=True)):
                assert set(table[:first]) <= {SINK_PAGE}, "a page behind a window is still in the table"
                owned += table[first:]
                if self._groups.windows[group] is not None:
                    in_windows.update(table[first:])
        self._pages.check_integrity(owned)
        owed = in_windows.total() - len(in_windows)
        assert self._owed == owed, f"{self._owed} pages are owed, and {owed} are shared"
        assert self.can_alloc(0), "pages were promised that are not there"

    def _load(self, host: HostPages, sequence: Sequence, copied: list[tuple[int, int]]) -> None:
        """Copy these groups and numbers of pages from the host, to pages that it is given."""
        slots = host.pin(sequence.page_keys, copied)  # first: what is evicted now may take a slot
        pages = self._pages.alloc(len(copied))
        for (group, page), allocated in zip(copied, pages, strict=True):
            sequence.pages[group][page] = allocated
        host.begin(sequence, slots, pages)

    def _let_go(self, sequence: Sequence) -> None:
        """Free what no token sees that is still to be computed, or computed again after a hit."""
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        start = max(known, sequence.num_computed_tokens - self._groups.step_tokens + 1) // self._page_size
        for group in self._windowed if sequence.pages else ():
            before, first = sequence.first_pages[group], start - self._groups.behind[group]
            if first > before:
                table = sequence.pages[group]
                self._free(group, table[before:first])
                table[before:first] = [SINK_PAGE] * (first - before)
                sequence.first_pages[group] = first

    def _share(self, keys: list[bytes], group: int) -> list[int]:
        pages = self._pages.find(keys_in_group(keys, group))
        assert len(pages) == len(keys), "a page of a prefix hit is gone"
        owned = self._pages.share(pages)
        if group in self._windowed:
            self._owed += owned
        return pages

    def _free(self, group: int, pages: Iterable[int]) -> None:
        owned = self._pages.free(pages)
        if group in self._windowed:
            self._owed -= owned
