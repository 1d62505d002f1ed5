"""What is on its way from one tier in host memory to the device, and for which sequences."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from caching.host_tier import HostTier
from caching.page_manager import SINK_PAGE
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.sequence import Sequence


@dataclass(eq=False, slots=True)
class _Load:
    """A copy from a slot of the host to a page; without a sequence, to the sink."""

    slot: int
    page: int
    sequence: Sequence | None


class Loads:
    """Keeps account of the copies of all sequences from one tier, which arrive in order.

    Where the tier is one of recurrent states, a page is a slot of the device's.
    """

    def __init__(self, tier: HostTier, *, of_states: bool = False) -> None:
        self._tier = tier
        self._of_states = of_states
        self._waiting: deque[_Load] = deque()
        self._under_way: deque[list[_Load]] = deque()
        self._arrived: list[list[_Load]] = []

    @property
    def num_waiting(self) -> int:
        """Copies that have not begun."""
        return len(self._waiting)

    @property
    def num_under_way(self) -> int:
        """Lists of ``Copies.fetches`` that have not arrived."""
        return len(self._under_way)

    def begin(self, sequence: Sequence, slots: list[int], pages: list[int]) -> None:
        """Copy these slots, which are pinned, to pages that the sequence owns."""
        sequence.num_loading += len(slots)
        self._waiting += [_Load(slot, page, sequence) for slot, page in zip(slots, pages, strict=True)]

    def cancel(self, sequence: Sequence) -> None:
        """The sequence gives its pages up before they have their contents."""
        others: deque[_Load] = deque()
        for load in self._waiting:
            if load.sequence is sequence:
                self._tier.unpin(load.slot)
            else:
                others.append(load)
        self._waiting = others
        for load in self._on_their_way():
            if load.sequence is sequence:
                load.page, load.sequence = SINK_PAGE, None

    def landed(self, stores: int, fetches: int) -> None:
        """The oldest so many lists of ``Copies.stores`` and ``Copies.fetches`` have arrived."""
        for _ in range(stores):
            self._tier.stored()
        for _ in range(fetches):
            self._arrived.append(self._under_way.popleft())

    def take_loaded(self) -> list[Sequence]:
        """The sequences for which nothing is on its way any more, from the plan on that is being
        made."""
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
        copies = Copies(self._tier.take_stores(), places, [load.slot for load in fetched], self._of_states)
        return copies if copies.stores or copies.places or copies.fetches else None

    def lose(self) -> None:
        """The host's memory and all that is on its way are lost. No sequence loads."""
        assert all(load.sequence is None for load in self._on_their_way()) and not self._waiting
        for load in self._on_their_way():
            self._tier.unpin(load.slot)
        self._under_way.clear()
        self._arrived.clear()
        self._tier.lose_copies()

    def pages_of(self, sequence: Sequence) -> list[int]:
        """Those that a sequence waits for."""
        return [load.page for load in (*self._waiting, *self._on_their_way()) if load.sequence is sequence]

    def sequences(self) -> set[Sequence]:
        """Those that wait for something."""
        return {load.sequence for load in (*self._waiting, *self._on_their_way()) if load.sequence is not None}

    def check_integrity(self) -> None:
        """Assert that the tier has what it should."""
        self._tier.check_integrity(load.slot for load in (*self._waiting, *self._on_their_way()))

    def _on_their_way(self) -> Iterable[_Load]:
        return [load for loads in (*self._under_way, *self._arrived) for load in loads]
