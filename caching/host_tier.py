"""The second tier of the prefix cache: which contents are in which slot of the host's memory.

Pages that nobody owns are copied to the host before the device evicts them, and come back for a
sequence that has them as its prefix. Recurrent states have a tier of their own, in which a page is
a slot of the device's. No memory here: copies are lists of numbers that a plan takes along
(engine/scheduling/host_cache/copies.py), and the device side makes them
(engine/step/host_cache/host_slots.py).
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable


class HostTier:
    """Slots of one page each, by key. The key that was used least recently is evicted first.

    A key is found from the plan on that copies its page: copies run in order, so that one back to
    the device reads what the one before it wrote. At most ``staged`` pages are on their way to the
    host at once; a page that is evicted meanwhile without a copy is lost, and counted.
    """

    def __init__(self, num_slots: int, staged: int, page_bytes: int = 0) -> None:
        if num_slots < 1 or staged < 1:
            raise ValueError(f"a tier needs a slot and a page on its way, not {num_slots} and {staged}")
        self.num_slots = num_slots
        self.staged = staged
        self.page_bytes = page_bytes
        """Bytes of a slot. For counts alone."""
        self.accepts = True
        """Whether a page is worth a copy."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._pins: Counter[int] = Counter()
        """Slots that are to be read yet, and how often."""
        self._next: OrderedDict[int, bytes] = OrderedDict()
        """Pages without owner or copy, in the order in which they will be evicted, and their keys."""
        self._stores: list[tuple[int, int]] = []
        self._storing: deque[int] = deque()
        self.pages_stored = 0
        """Pages copied to the host."""
        self.pages_loaded = 0
        """Pages copied back."""
        self.pages_lost = 0
        """Pages that were evicted from the device without a copy."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    @property
    def num_kept(self) -> int:
        """Keys that are found."""
        return len(self._slot_of)

    def offer(self, page: int, key: bytes) -> None:
        """The page has lost its last owner, and will be evicted after those offered before it."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
        else:
            self._next[page] = key

    def withdraw(self, page: int) -> None:
        """The page has an owner again, or its contents are forgotten."""
        self._next.pop(page, None)

    def evict(self, page: int, key: bytes) -> None:
        """The page is given to another owner: the last chance to copy it."""
        self._next.pop(page, None)
        if key not in self._slot_of and self.accepts and not self._store(page, key):
            self.pages_lost += 1

    def store_ahead(self) -> None:
        """Copy those pages that will be evicted next, as far as there is room on the way."""
        while self.accepts and self._next:
            page, key = next(iter(self._next.items()))
            if key not in self._slot_of and not self._store(page, key):
                break
            del self._next[page]

    def take_stores(self) -> list[tuple[int, int]]:
        """Pages and the slots to copy them to, before anything else is written to the pages.

        The caller calls ``stored`` once for each list that is not empty, in their order.
        """
        stores, self._stores = self._stores, []
        if stores:
            self._storing.append(len(stores))
            self.pages_stored += len(stores)
        return stores

    def stored(self) -> None:
        """The oldest list of copies has arrived."""
        self._storing.popleft()

    def pin(self, key: bytes) -> int:
        """The slot of a key, which keeps its contents until it is unpinned as often."""
        slot = self._slot_of[key]
        self._slot_of.move_to_end(key)
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """The slot has been read, or will not be."""
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot not in self._key_of:
                self._free.append(slot)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These keys are not found any more."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                del self._key_of[slot]
                if slot not in self._pins:
                    self._free.append(slot)

    def forget_all(self) -> int:
        """No key is found any more; returns how many were."""
        count = self.num_kept
        self.forget(list(self._slot_of))
        return count

    def lose_copies(self) -> None:
        """All that is on its way is lost, and what it was to become."""
        self._stores.clear()
        self._storing.clear()
        self.forget_all()

    def check_integrity(self, pinned: Iterable[int]) -> None:
        """Assert that each slot is free, found or pinned; ``pinned`` has a slot per pin."""
        assert Counter(pinned) == self._pins, f"pins are {dict(self._pins)}"
        found = set(self._key_of)
        assert self._key_of == {slot: key for key, slot in self._slot_of.items()}, "a slot has another's key"
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert free.isdisjoint(found | set(self._pins)), "a slot is free and in use"
        assert free | found | set(self._pins) == set(range(self.num_slots)), "a slot is lost"
        assert sum(self._storing) + len(self._stores) <= self.staged, "more is on its way than there is room for"

    def _store(self, page: int, key: bytes) -> bool:
        """Whether there is a slot, and room on the way to it."""
        if sum(self._storing) + len(self._stores) >= self.staged:
            return False
        slot = self._free.pop() if self._free else self._evict_slot()
        if slot is None:
            return False
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._stores.append((page, slot))
        return True

    def _evict_slot(self) -> int | None:
        """The slot of the key that was used least recently; None if all are pinned."""
        for key, slot in self._slot_of.items():
            if slot not in self._pins:
                del self._slot_of[key], self._key_of[slot]
                return slot
        return None
