"""The pages of sequences: prefix hits, pages for tokens to come, and what is cached."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from caching.cache_groups import CacheGroups
from caching.metadata import pages_for
from caching.page_manager import SINK_PAGE, Found, HBMPageManager
from caching.prefix_cache import in_group
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.host_cache.host_pages import HostPages
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.prefixes.earlier_texts import EarlierTexts
from engine.scheduling.prefixes.prefix_hits import PrefixHits, keys_in_group
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence


class SequenceMemory:
    """Gives pages to sequences and takes them back: ``find``, ``fits``, ``begin``, ``grow``,
    ``computed`` and ``release`` are the doors between the scheduler and the page manager.

    A page enters the prefix cache in the plan that fills it: steps run in order, and a step writes
    before it reads. The last known token of a sequence is never a prefix hit, as a step samples
    from it. A sequence without a salt shares no pages, and its tokens are not hashed.

    A sequence has a page table for each of the ``groups``. In those with a window, its pages return
    as soon as no token that is still to be computed sees them, and a prefix hit needs the last
    window alone. A prompt that was admitted never waits for pages there either: a page that others
    share takes one of the pool for each of its owners, as each will want another in its place.

    In a model with recurrent layers a prefix hit also ends where one of the ``states`` is kept.
    Beside pages sequences share the texts of ``earlier`` ones, for drafts.
    """

    def __init__(
        self,
        pages: HBMPageManager,
        groups: CacheGroups,
        states: SequenceStates | None = None,
        cost: CopyCost | None = None,
        earlier: EarlierTexts | None = None,
    ) -> None:
        self.groups = groups
        self.earlier = earlier or EarlierTexts()
        """Texts of sequences that have ended; by default none are kept."""
        self._states = states
        self.host = None if pages.tier is None or cost is None else HostPages(pages.tier, pages, groups, states, cost)
        """The second tier of the prefix cache, if there is one."""
        self.page_size = groups.page_size
        """Tokens in a page."""
        self._num_groups, self._full, self._windowed = len(groups.windows), groups.full, groups.windowed
        self._pages = pages
        self._owed = 0
        """Owners of the pages of windows beyond the first of each: pages that they may yet take."""
        self._prefilled: list[Sequence] = []
        """Those that have planned their last chunk since the last plan."""
        self.hits = PrefixHits(pages, groups, states)
        """What of waiting sequences the device has."""

    @property
    def num_pages(self) -> int:
        """Pages that sequences can own."""
        return self._pages.num_total

    def find(self, sequence: Sequence) -> Found | None:
        """About what the prefix cache has of a waiting sequence; None while another computes more.

        It costs what has changed since the last time, as most sequences that wait go on waiting.
        """
        found = self.hits.find(sequence)
        if found is not None and self.host is not None and self.hits.may_share(sequence):
            self.host.recount(sequence, found.held, self.hits.keys(sequence)[1])
        return found

    def num_left(self, sequence: Sequence, found: Found) -> int:
        """Known tokens that are to be computed behind the prefix hit."""
        return sequence.num_tokens - max(found.held, sequence.num_known_pages) * self.page_size

    def needed(self, sequence: Sequence, found: Found) -> int:
        """Free or cached pages that admission takes: all but prefix hits that have an owner."""
        return self.groups.pages_from(found.held * self.page_size, sequence.num_tokens) - found.owned

    def fits(self, sequence: Sequence, found: Found, spare: int) -> bool:
        """Whether the sequence can be admitted with ``spare`` pages left free or cached."""
        return self._pages.can_alloc(self.needed(sequence, found) + spare + self._owed)

    def begin(self, sequence: Sequence, found: Found, spare: int) -> bool:
        """Give it pages for all known tokens; False if that leaves fewer than ``spare``.

        Also False if another sequence is about to compute the page after the last hit.
        """
        if not self.fits(sequence, found, spare):
            return False
        exact = self.hits.find_exactly(sequence)
        if exact is None or not self.fits(sequence, exact, spare):
            return False
        held, copied = exact.held, list[tuple[int, int]]()
        if self.host is not None and self.hits.may_share(sequence):
            held, copied = self.host.hit(sequence.page_keys, held, self.hits.keys(sequence)[1])
        if sequence.scheduled_at is None:
            sequence.num_host_tokens = (held - exact.held) * self.page_size
        self._take(sequence, held, copied)
        if self._states is not None:
            self._begin_states(self._states, sequence, held)
        self.hits.begin(sequence, exact.held)
        self.earlier.begin(sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Give it pages for one more page of tokens; False if too few are free or cached."""
        if self._windowed:
            self._let_go(sequence)
        if not self._pages.can_alloc(self._num_groups + self._owed):
            return False
        for table in sequence.pages:
            table += self._pages.alloc(1)
        sequence.num_paged_tokens += self.page_size
        return True

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Where a row of its prompt's tokens ends that could end at token ``end``."""
        return end if self._states is None else self._states.row_end(sequence, end)

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Known tokens from start to end are planned: cache the pages that they fill."""
        if self._windowed:
            self._advance(sequence)
            if end == sequence.num_prefill_tokens:
                self._prefilled.append(sequence)
        self._cache(sequence, start, end)

    def release(self, sequence: Sequence) -> None:
        """Take its pages back; those filled with known output tokens go into the cache first.

        Steps in flight may still write to the pages, but they run before any new owner's.
        """
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        if known > sequence.num_prefill_tokens:
            self._cache(sequence, sequence.num_prefill_tokens, known)
        self.hits.release(sequence)
        if self._states is not None:
            self._states.release(sequence)
        if self.host is not None and sequence.num_loading:
            self.host.cancel(sequence)
        for group, table in enumerate(sequence.pages):
            self._free(group, reversed(table[sequence.first_pages[group] :]))
        sequence.pages, sequence.first_pages, sequence.earlier = [], [], ()
        sequence.num_computed_tokens = sequence.num_paged_tokens = 0
        sequence.keeps_to_itself = False

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

    def growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens, in each group counted anew, for which it needs pages if it generates so many."""
        if not self._windowed:
            return self._num_groups * num_tokens
        return self.groups.growth(sequence.num_tokens, num_tokens)

    def begin_plan(self, now: float) -> None:
        """Take back what prompts that are computed needed beside their windows, and cache what
        has come from the host.

        ``now`` is the time in seconds, from which the prefix cache computes how old its pages are.
        """
        self._pages.now = now
        for sequence in self._prefilled:
            self._let_go(sequence)
        self._prefilled.clear()
        if self._states is not None:
            self._states.begin_plan(now)
        if self.host is not None:
            self.host.begin_plan()
            for sequence in self.host.take_loaded():
                self._cache(sequence, 0, sequence.num_computed_tokens)
                if self._states is not None:
                    self._states.loaded(sequence)

    def end_plan(self, plan: NextIterationPlan) -> None:
        """All rows of the plan are known."""
        if self._states is not None:
            self._states.end_plan(plan)
        self.hits.end_plan()
        if self.host is not None:
            plan.copies = self.host.take_copies()

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop what these sequences computed from the cache, also where they are released."""
        for sequence in sequences:
            for group in range(self._num_groups):
                keys = keys_in_group(sequence.page_keys, group)
                self._pages.forget_keys(keys)
                if self._pages.tier is not None:
                    self._pages.tier.forget(keys)
            if self._states is not None:
                self._states.forget(sequence)

    def forget_all(self, running: Iterable[Sequence]) -> int:
        """Empty the prefix cache; returns how many pages it had, those of the host included.

        Nobody finds what running sequences have by then; they keep it.
        """
        for sequence in running:
            sequence.keeps_to_itself = True
        self.hits.forget_all()
        self.earlier.forget_all()
        if self._states is not None:
            self._states.forget_all()
        return self._pages.forget_all() + (0 if self._pages.tier is None else self._pages.tier.forget_all())

    def lose_pages(self, *, keep_host: bool) -> None:
        """The device's pages are lost, and unless ``keep_host`` the host's. No sequence has any."""
        self.earlier.forget_all()
        if self._states is not None:
            self._states.lose_slots()
        self._pages.forget_all()
        if self.host is not None and not keep_host:
            self.host.lose_copies()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that running sequences own their pages, and only they compute prefixes."""
        running = list(running)
        self.earlier.check_integrity()
        if self.host is not None:
            self.host.check_integrity(running)
        owned: list[int] = []
        in_windows: Counter[int] = Counter()
        for sequence in running:
            for group, (table, first) in enumerate(zip(sequence.pages, sequence.first_pages, strict=True)):
                assert set(table[:first]) <= {SINK_PAGE}, "a page behind a window is still in the table"
                owned += table[first:]
                if self.groups.windows[group] is not None:
                    in_windows.update(table[first:])
        self._pages.check_integrity(owned)
        if self._states is not None:
            self._states.check_integrity(running)
        owed = in_windows.total() - len(in_windows)
        assert self._owed == owed, f"{self._owed} pages are owed, and {owed} are shared"
        assert self._pages.can_alloc(self._owed), "pages were promised that are not there"
        self.hits.check_integrity(running)

    def _take(self, sequence: Sequence, held: int, copied: list[tuple[int, int]]) -> None:
        """Share a prefix hit of ``held`` pages, and allocate for what is behind it.

        The pages ``copied``, each a group and a number, are the host's: they come from there.
        """
        num_pages, start = pages_for(sequence.num_tokens, self.page_size), held * self.page_size
        spans = [self.groups.span(group, start, num_pages) for group in range(self._num_groups)]
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
        if self.host is not None and copied:
            self._load(sequence, copied)
        for table, (_, past) in zip(sequence.pages, spans, strict=True):
            table += self._pages.alloc(past - len(table))
        sequence.num_computed_tokens = start
        sequence.num_paged_tokens = num_pages * self.page_size

    def _load(self, sequence: Sequence, copied: list[tuple[int, int]]) -> None:
        """Copy these groups and numbers of pages from the host, to pages that it is given."""
        assert self.host is not None
        slots = self.host.pin(sequence.page_keys, copied)  # first: what is evicted now may take a slot
        pages = self._pages.alloc(len(copied))
        for (group, page), allocated in zip(copied, pages, strict=True):
            sequence.pages[group][page] = allocated
        self.host.begin(sequence, slots, pages)

    def _advance(self, sequence: Sequence) -> None:
        """Move the windows of a prompt on to its next chunk."""
        self._let_go(sequence)
        num_pages = sequence.num_paged_tokens // self.page_size
        for group in self._windowed:
            _, past = self.groups.span(group, sequence.num_computed_tokens, num_pages)
            table = sequence.pages[group]
            if past > len(table):
                table += self._pages.alloc(past - len(table))

    def _let_go(self, sequence: Sequence) -> None:
        """Free what no token sees that is still to be computed, or computed again after a hit."""
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        start = max(known, sequence.num_computed_tokens - self.groups.step_tokens + 1) // self.page_size
        for group in self._windowed if sequence.pages else ():
            before, first = sequence.first_pages[group], start - self.groups.behind[group]
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

    def _cache(self, sequence: Sequence, start: int, end: int) -> None:
        first, last = start // self.page_size, end // self.page_size
        if first == last or not sequence.can_be_found:
            return
        keys = sequence.page_keys_to(last, self.page_size)
        for group, table in enumerate(sequence.pages):
            for page in range(max(first, sequence.first_pages[group]), last):
                self._pages.keep(table[page], in_group(keys[page], group))
        self.hits.computed(sequence, keys[first:last])

    def _begin_states(self, states: SequenceStates, sequence: Sequence, held: int) -> None:
        """Give it a slot. A row ends where its known pages do, if no state is kept there."""
        key = sequence.page_keys[held - 1] if held else None
        if key is None or states.is_kept(key):
            states.begin(sequence, key)
        else:
            assert self.host is not None
            self.host.begin_state(sequence, *states.begin_from_host(sequence, key))
        known = min((found.held for found in sequence.chains), default=0)
        sequence.branch = known * self.page_size if known > held else 0
