"""Prefix hits in host memory: what a sequence has there, and its way back to the device.

A sequence with such a hit is given a slot and all its pages, and is *loading* until the copies have
arrived: others run meanwhile, those with the same prefix wait for it. Copies of several sequences
arrive in the order of admission. A loading sequence that ends or is preempted gives its pages up
at once; what is on its way to them is written to the sink instead. In a model with recurrent
layers a hit ends where a state is kept, on the device or on the host, and brings it along.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from caching.cache_groups import CacheGroups
from caching.host_tier import HostTier
from caching.page_manager import HBMPageManager
from caching.prefix_cache import in_group
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.host_cache.loads import Loads
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence

AHEAD = 4
"""Pages are copied to the host before they are evicted when fewer than one in so many is free."""


class HostPages:
    """Looks for hits in the ``tier`` and that of the states, and keeps account of all copies."""

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
        self.tier = tier
        self._pages = pages
        self._groups = groups
        self._states = states
        self._of_pages = Loads(tier)
        self._loads = [self._of_pages]
        self.state_tier = None if states is None else states.tier
        if self.state_tier is not None:
            self._of_states = Loads(self.state_tier, of_states=True)
            self._loads.append(self._of_states)

    @property
    def num_under_way(self) -> int:
        """Lists of ``Copies.fetches`` that have not arrived."""
        return sum(loads.num_under_way for loads in self._loads)

    def recount(self, sequence: Sequence, held: int, count: int) -> None:
        """Note about how many of the first ``count`` pages of tokens the device and the host have.

        ``held`` are those of a hit on the device. The cost is that of the change since the last
        time. In groups with windows, pages are not looked for.
        """
        keys = sequence.page_keys
        end = max(held, min(sequence.known_chain, count))
        while end > held and not self._all_known(keys[end - 1]):
            end -= 1
        while self._groups.full and end < count and self._all_known(keys[end]):
            end += 1
        sequence.known_chain = sequence.num_known_pages = end
        if self._states is not None:
            sequence.num_known_pages = next(self._states.hits(keys, end, on_host=True), held)

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
        states = self._states_copied(keys, end)
        if not saved or not self.cost.pays(len(copied) + self._of_pages.num_waiting, saved, states):
            return held, []
        self.tokens_found += saved
        return end, copied

    def pin(self, keys: ListOf[bytes], copied: Iterable[tuple[int, int]]) -> list[int]:
        """The slots of these groups and pages, which keep their contents until they are copied."""
        return [self.tier.pin(in_group(keys[page], group)) for group, page in copied]

    def begin(self, sequence: Sequence, slots: list[int], pages: list[int]) -> None:
        """Copy these slots to pages that the sequence owns."""
        self._of_pages.begin(sequence, slots, pages)

    def begin_state(self, sequence: Sequence, host_slot: int, slot: int) -> None:
        """Copy a state from a slot of the host, which is pinned, to one that the sequence owns."""
        self._of_states.begin(sequence, [host_slot], [slot])

    def cancel(self, sequence: Sequence) -> None:
        """The sequence gives its pages up before they have their contents."""
        for loads in self._loads:
            loads.cancel(sequence)
        sequence.num_loading = 0

    def forget(self, keys: set[bytes]) -> None:
        """Who waits for what has one of these keys keeps to itself what comes."""
        for sequence in set[Sequence]().union(*(loads.sequences() for loads in self._loads)):
            if not keys.isdisjoint(sequence.page_keys):
                sequence.keeps_to_itself = True

    def landed(self, counts: Iterable[tuple[int, int]]) -> None:
        """Of pages, and of states: the oldest so many lists of ``Copies.stores`` and
        ``Copies.fetches`` have arrived."""
        for loads, (stores, fetches) in zip(self._loads, counts, strict=True):
            loads.landed(stores, fetches)

    def begin_plan(self) -> None:
        """Copy what will be evicted soon, if that is worth it: without its pages no state is."""
        self.tier.accepts = self.cost.pays(1, self._groups.page_size)
        if self._pages.num_free < self._pages.num_total // AHEAD:
            self.tier.store_ahead()
        if self._states is not None and self.state_tier is not None:
            self.state_tier.accepts = self.tier.accepts
            if self._states.num_unused < self._states.num_to_keep // AHEAD:
                self.state_tier.store_ahead()

    def take_loaded(self) -> list[Sequence]:
        """The sequences that have all that was on its way, from the plan on that is being made."""
        return [sequence for loads in self._loads for sequence in loads.take_loaded()]

    def take_copies(self) -> list[Copies]:
        """The copies of the plan that is being made."""
        return [copies for loads in self._loads if (copies := loads.take_copies()) is not None]

    def lose_copies(self) -> None:
        """The host's memory and all that is on its way are lost. No sequence loads."""
        for loads in self._loads:
            loads.lose()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that what loads is owned, and that the tiers have what they should."""
        for loads in self._loads:
            loads.check_integrity()
        for sequence in running:
            pages, slots = self._of_pages.pages_of(sequence), list[int]()
            if self.state_tier is not None:
                slots = self._of_states.pages_of(sequence)
            assert len(pages) + len(slots) == sequence.num_loading, "a page is not on its way"
            owned = {page for table in sequence.pages for page in table}
            assert set(pages) <= owned, "a page is copied to another's"
            assert set(slots) <= {sequence.state_source}, "a state is copied to another's"

    def _hit_of_groups(self, keys: ListOf[bytes], held: int, end: int) -> int:
        """The longest hit of at most ``end`` pages at whose end all windows and a state are known."""

        def is_known(page: int, group: int) -> bool:
            return self._is_known(in_group(keys[page], group))

        if self._states is None:
            return self._groups.hit(end, is_known)
        hits = self._states.hits(keys, end, on_host=True)
        return max(held, next((hit for hit in hits if self._groups.hit(hit, is_known) == hit), 0))

    def _states_copied(self, keys: ListOf[bytes], end: int) -> int:
        """States that wait for the link, with that of a hit of ``end`` pages if the host has it
        alone."""
        if self._states is None or self.state_tier is None:
            return 0
        return self._of_states.num_waiting + bool(end and not self._states.is_kept(keys[end - 1]))

    def _all_known(self, key: bytes) -> bool:
        """Whether a page of tokens is known in all groups that keep all tokens."""
        return all(self._is_known(in_group(key, group)) for group in self._groups.full)

    def _is_known(self, key: bytes) -> bool:
        return self._pages.is_kept(key) or key in self.tier
