"""The pages of sequences: prefix hits, pages for tokens to come, and what is cached."""

from collections.abc import Iterable

from caching.cache_groups import CacheGroups
from caching.page_manager import Found, HBMPageManager
from caching.prefix_cache import in_group
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.host_cache.host_pages import HostPages
from engine.scheduling.page_tables import PageTables
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

    A sequence has a page table for each of the ``groups`` (``page_tables``). In those with a
    window, a prefix hit needs the last window alone.

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
        self._num_groups = len(groups.windows)
        self.pages = pages
        self._tables = PageTables(pages, groups, self.host)
        self.hits = PrefixHits(pages, groups, states)
        """What of waiting sequences the device has."""

    @property
    def slots(self) -> HBMPageManager | None:
        """Those of recurrent states, in a model that has such."""
        return None if self._states is None else self._states.slots

    @property
    def num_pages(self) -> int:
        """Pages that sequences can own."""
        return self.pages.num_total

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
        return self._tables.can_alloc(self.needed(sequence, found) + spare)

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
        self._tables.begin(sequence, held, copied)
        if self._states is not None:
            self._begin_states(self._states, sequence, held)
        self.hits.begin(sequence, exact.held)
        self.earlier.begin(sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Give it pages for one more page of tokens; False if too few are free or cached."""
        return self._tables.grow(sequence)

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Where a row of its prompt's tokens ends that could end at token ``end``."""
        return end if self._states is None else self._states.row_end(sequence, end)

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Known tokens from start to end are planned: cache the pages that they fill."""
        self._tables.computed(sequence, end)
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
        self._tables.release(sequence)
        sequence.earlier = ()
        sequence.num_computed_tokens = sequence.num_paged_tokens = 0
        sequence.keeps_to_itself = False

    def num_exclusive(self, sequences: Iterable[Sequence]) -> int:
        """Pages that would come free if these sequences were released."""
        return self._tables.num_exclusive(sequences)

    def growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens, in each group counted anew, for which it needs pages if it generates so many."""
        if not self.groups.windowed:
            return self._num_groups * num_tokens
        return self.groups.growth(sequence.num_tokens, num_tokens)

    def begin_plan(self, now: float) -> None:
        """Take back what prompts that are computed needed beside their windows, and cache what
        has come from the host.

        ``now`` is the time in seconds, from which the prefix cache computes how old its pages are.
        """
        self.pages.now = now
        self._tables.begin_plan()
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
        """Drop what these sequences computed from the cache, also where they are released.

        What others wait for that comes from the host is not found when it has come, either.
        """
        for sequence in sequences:
            if self.host is not None:
                self.host.forget(set(sequence.page_keys))
            for group in range(self._num_groups):
                self.pages.forget_keys(keys_in_group(sequence.page_keys, group))
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
        return self.pages.forget_all() + (0 if self.pages.tier is None else self.pages.tier.forget_all())

    def lose_pages(self, *, keep_host: bool) -> None:
        """The device's pages are lost, and unless ``keep_host`` the host's. No sequence has any."""
        self.earlier.forget_all()
        if self._states is not None:
            self._states.lose_slots()
        self.pages.forget_all()
        if self.host is not None and not keep_host:
            self.host.lose_copies()

    def stats(self) -> dict[str, float]:
        """The part of EngineStats that is about pages and states, and what sequences find of earlier ones."""
        pages, slots = self.pages, self.slots
        return {
            "pages_total": pages.num_total,
            "pages_free": pages.num_free,
            "pages_cached": pages.num_cached,
            "pages_owned": pages.num_owned,
            "page_evictions": pages.cache.evictions,
            "page_lifetime_seconds_sum": pages.cache.lifetime_seconds,
            "page_idle_seconds_sum": pages.cache.idle_seconds,
            "recurrent_states_total": 0 if slots is None else slots.num_total,
            "recurrent_states_cached": 0 if slots is None else slots.num_cached,
            "recurrent_state_evictions": 0 if slots is None else slots.cache.evictions,
            "prefix_cache_queries": self.hits.tokens_looked_up,
            "prefix_cache_hits": self.hits.tokens_found,
            "earlier_tokens": self.earlier.num_kept,
            "earlier_salts": self.earlier.num_salts,
        }

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that running sequences own their pages, and only they compute prefixes."""
        running = list(running)
        self.earlier.check_integrity()
        if self.host is not None:
            self.host.check_integrity(running)
        self._tables.check_integrity(running)
        if self._states is not None:
            self._states.check_integrity(running)
        self.hits.check_integrity(running)

    def _cache(self, sequence: Sequence, start: int, end: int) -> None:
        first, last = start // self.page_size, end // self.page_size
        if first == last or not sequence.can_be_found:
            return
        keys = sequence.page_keys_to(last, self.page_size)
        for group, table in enumerate(sequence.pages):
            for page in range(max(first, sequence.first_pages[group]), last):
                self.pages.keep(table[page], in_group(keys[page], group))
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
