"""Prefix hits in host memory: what a sequence has there, and its way back to the device.

A sequence with such a hit is given a slot and all its pages, and is *loading* until the copies have
arrived: others run meanwhile, those with the same prefix wait for it. Copies of several sequences
arrive in the order of admission. A loading sequence that ends or is preempted gives its pages up
at once; what is on its way to them is written to the sink instead.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from caching.cache_groups import CacheGroups
from caching.host_tier import HostTier
from caching.page_manager import SINK_PAGE, HBMPageManager
from caching.prefix_cache import in_group
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence

AHEAD = 4
"""Pages are copied to the host before they are evicted when fewer than one in so many is free."""


@dataclass(eq=False, slots=True)
class _Load:
    """A copy from a slot to a page; without a sequence, to the sink."""

    slot: int
    page: int
    sequence: Sequence | None


class HostPages:
    """Looks for hits in the ``tier``, and keeps account of the copies of all sequences."""

    def __init__(
        self,
        tier: HostTier,
        pages: HBMPageManager,
        groups: CacheGroups,
        states: SequenceStates | None,
        cost: CopyCost,
    ) -> None:
        self.cost = cost
        self.tokens_looked_up = 0
        """Tokens of admitted sequences that the device's pages did not have."""
        self.tokens_found = 0
        """Those of them that the host had."""
        self._tier = tier
        self._pages = pages
        self._groups = groups
        self._states = states
        self._waiting: deque[_Load] = deque()
        self._under_way: deque[list[_Load]] = deque()
        self._arrived: list[list[_Load]] = []

    @property
    def num_under_way(self) -> int:
        """Lists of ``Copies.fetches`` that have not arrived."""
        return len(self._under_way)

    def recount(self, keys: ListOf[bytes], held: int, count: int, last: int) -> int:
        """About how many of the first ``count`` pages of tokens the device and the host have.

        ``held`` are those of a hit on the device, and ``last`` is the last result: the cost is that
        of the change. In groups with windows, pages are not looked for.
        """
        end = max(held, min(last, count))
        while end > held and not self._all_known(keys[end - 1]):
            end -= 1
        while self._groups.full and end < count and self._all_known(keys[end]):
            end += 1
        return end

    def hit(self, keys: ListOf[bytes], held: int, count: int) -> tuple[int, list[tuple[int, int]]]:
        """The longest hit of both memories that pays, in pages of tokens; ``held`` are the device's.

        Also the group and the number of each page that is to be copied for it.
        """
        end = held if self._groups.full else count
        while end < count and self._all_known(keys[end]):
            end += 1
        end = self._hit_of_groups(keys, held, end)
        copied = [
            (group, page)
            for group in range(len(self._groups.windows))
            for page in range(self._groups.span(group, end * self._groups.page_size, end)[0], end)
            if not self._pages.is_kept(in_group(keys[page], group))
        ]
        self.tokens_looked_up += (count - held) * self._groups.page_size
        saved = (end - held) * self._groups.page_size
        if not copied or not self.cost.pays(len(copied) + len(self._waiting), saved):
            return held, []
        self.tokens_found += saved
        return end, copied

    def pin(self, keys: ListOf[bytes], copied: Iterable[tuple[int, int]]) -> list[int]:
        """The slots of these groups and pages, which keep their contents until they are copied."""
        return [self._tier.pin(in_group(keys[page], group)) for group, page in copied]

    def begin(self, sequence: Sequence, slots: list[int], pages: list[int]) -> None:
        """Copy these slots to pages that the sequence owns."""
        sequence.num_loading = len(slots)
        self._waiting += [_Load(slot, page, sequence) for slot, page in zip(slots, pages, strict=True)]

    def cancel(self, sequence: Sequence) -> None:
        """The sequence gives its pages up before they have their contents."""
        sequence.num_loading = 0
        for load in [load for load in self._waiting if load.sequence is sequence]:
            self._waiting.remove(load)
            self._tier.unpin(load.slot)
        for load in self._loads_on_their_way():
            if load.sequence is sequence:
                load.page, load.sequence = SINK_PAGE, None

    def landed(self, stores: int, fetches: int) -> None:
        """The oldest so many lists of ``Copies.stores`` and ``Copies.fetches`` have arrived."""
        for _ in range(stores):
            self._tier.stored()
        for _ in range(fetches):
            self._arrived.append(self._under_way.popleft())

    def begin_plan(self) -> None:
        """Copy what will be evicted soon, if that is worth it."""
        self._tier.accepts = self.cost.pays(1, self._groups.page_size)
        if self._pages.num_free < self._pages.num_total // AHEAD:
            self._tier.store_ahead()

    def take_loaded(self) -> list[Sequence]:
        """The sequences whose last page is in place from the plan on that is being made."""
        loaded = []
        for load in [load for loads in self._arrived for load in loads]:
            self._tier.pages_loaded += 1
            if load.sequence is not None:
                load.sequence.num_loading -= 1
                if not load.sequence.num_loading:
                    loaded.append(load.sequence)
        return loaded

    def take_copies(self) -> Copies | None:
        """The copies of the plan that is being made, if there are any."""
        places = [[load.page for load in loads] for loads in self._arrived]
        for load in [load for loads in self._arrived for load in loads]:
            self._tier.unpin(load.slot)
        self._arrived.clear()
        room = self._tier.staged - sum(map(len, self._under_way))
        fetched = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if fetched:
            self._under_way.append(fetched)
        copies = Copies(self._tier.take_stores(), places, [load.slot for load in fetched])
        return copies if copies.stores or copies.places or copies.fetches else None

    def lose_copies(self) -> None:
        """The host's memory and all that is on its way are lost. No sequence loads."""
        assert all(load.sequence is None for load in self._loads_on_their_way()) and not self._waiting
        for load in self._loads_on_their_way():
            self._tier.unpin(load.slot)
        self._under_way.clear()
        self._arrived.clear()
        self._tier.lose_copies()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that what loads is owned, and that the tier has what it should."""
        loads = [*self._waiting, *self._loads_on_their_way()]
        self._tier.check_integrity(load.slot for load in loads)
        for sequence in running:
            own = {load.page for load in loads if load.sequence is sequence}
            assert len(own) == sequence.num_loading, "a page is not on its way"
            assert own <= {page for table in sequence.pages for page in table}, "a page is copied to another's"

    def _loads_on_their_way(self) -> list[_Load]:
        return [load for loads in (*self._under_way, *self._arrived) for load in loads]

    def _hit_of_groups(self, keys: ListOf[bytes], held: int, end: int) -> int:
        """The longest hit of at most ``end`` pages at whose end all windows and a state are known.

        States are the device's alone: a hit without one there is no longer than ``held``.
        """

        def is_known(page: int, group: int) -> bool:
            return self._is_known(in_group(keys[page], group))

        if self._states is None:
            return self._groups.hit(end, is_known)
        hits = self._states.hits(list(keys), end)
        return max(held, next((hit for hit in hits if self._groups.hit(hit, is_known) == hit), 0))

    def _all_known(self, key: bytes) -> bool:
        """Whether a page of tokens is known in all groups that keep all tokens."""
        return all(self._is_known(in_group(key, group)) for group in self._groups.full)

    def _is_known(self, key: bytes) -> bool:
        return self._pages.is_kept(key) or key in self._tier
