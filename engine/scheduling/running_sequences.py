"""Sequences with a slot, and which of them is to yield where there is not enough for all."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from engine.scheduling.sequence import Sequence


class RunningSequences:
    """Who has which slot, in the order in which they got them.

    Of two sequences the less important is the one of the higher ``priority``, and of equals the one that arrived later.
    That order never changes in a sequence's life: the most important of all never yields, so something always advances.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._sequences: dict[str, Sequence] = {}
        self._by_client: Counter[str] = Counter()
        self._by_priority: Counter[int] = Counter()
        self.growth = 0
        """Tokens that all of them are expected to generate yet."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._slots)

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of that id, if it runs."""
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Give it a slot."""
        sequence.slot = self._slots.pop()
        self._sequences[sequence.request_id] = sequence
        self._by_client[sequence.client] += 1
        self._by_priority[sequence.params.priority] += 1
        self.growth += sequence.expected_growth

    def remove(self, sequence: Sequence) -> None:
        """Take its slot back."""
        del self._sequences[sequence.request_id]
        self._slots.append(sequence.slot)
        sequence.slot = -1
        _take_one(self._by_client, sequence.client)
        _take_one(self._by_priority, sequence.params.priority)
        self.growth -= sequence.expected_growth

    def expect(self, sequence: Sequence, growth: int) -> None:
        """From now on it is expected to generate so many tokens yet."""
        self.growth += growth - sequence.expected_growth
        sequence.expected_growth = growth

    @property
    def highest_priority(self) -> int:
        """That of the least important one."""
        return max(self._by_priority)

    def least_important(self) -> Sequence:
        """The first to yield pages."""
        return max(self, key=_importance)

    def over_its_share(self, client: str) -> Sequence | None:
        """Who may yield to a client that runs nothing: the least important of the client that runs most.

        None where that client runs no more than it would if all ran as many.
        """
        if client in self._by_client or not self._by_client:
            return None
        largest, count = self._by_client.most_common(1)[0]
        if count <= max(1, len(self) // (len(self._by_client) + 1)):
            return None
        return max((sequence for sequence in self if sequence.client == largest), key=_importance)

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one owner or none."""
        taken = [sequence.slot for sequence in self]
        slots = taken + self._slots
        assert sorted(slots) == list(range(self._max_num_seqs)), f"slots are {taken} and {self._slots}"
        assert self._by_client == Counter(sequence.client for sequence in self), "a client's count is wrong"
        assert self._by_priority == Counter(sequence.params.priority for sequence in self), (
            "a priority's count is wrong"
        )
        assert self.growth == sum(sequence.expected_growth for sequence in self), "the growth is wrong"


def _take_one(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _importance(sequence: Sequence) -> tuple[int, int]:
    return sequence.params.priority, sequence.arrival
