"""Sequences with a slot and pages, and which of them are preempted first."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from itertools import chain
from typing import Any

from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.constraints.late_samples import LateSamples
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.sequence import Sequence, SequenceStatus
from engine.scheduling.sequence_memory import SequenceMemory


class RunningSequences:
    """Running sequences in the order in which they were admitted.

    Of two sequences the less important is the one of the higher ``priority``, and of equals the
    one that arrived later. That order never changes in a sequence's life, and the most important
    one is never preempted, nor a client's only one for the growth of who has several, so something
    always advances.
    """

    def __init__(
        self, max_num_seqs: int, memory: SequenceMemory, reserve: GrowthReserve, adapters: AdapterSlots
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._memory, self._adapters = memory, adapters
        self.late = LateSamples()
        """Those that are to sample as soon as their constraints have answered."""
        self._reserve = reserve
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._sequences: dict[str, Sequence] = {}
        self._prefilling: dict[Sequence, None] = {}
        """Those that compute known tokens, and some that have just done with that, in the same order."""
        self._by_client: Counter[str] = Counter()
        self._by_priority: Counter[int] = Counter()
        self._growth = 0
        """Of all of them, the ``expected_growth``."""
        self._admitted: dict[Sequence, None] = {}
        """Those that have been given a slot and are not in any plan yet."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._slots)

    def get(self, request_id: str) -> Sequence | None:
        """The running sequence of that id."""
        return self._sequences.get(request_id)

    def runs(self, client: str) -> bool:
        """Whether a client has a slot."""
        return client in self._by_client

    def add(self, sequence: Sequence) -> None:
        """Give a sequence that has its pages, and room for its adapter, a slot."""
        self._adapters.pin(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._slots.pop()
        self._sequences[sequence.request_id] = sequence
        self._prefilling[sequence] = None
        self._admitted[sequence] = None
        self._by_client[sequence.client] += 1
        self._by_priority[sequence.params.priority] += 1
        sequence.expected_growth = self._expected_growth(sequence)
        self._growth += sequence.expected_growth

    def remove(self, sequence: Sequence) -> None:
        """Take slot and pages back, whatever is in flight: the device runs steps in order."""
        del self._sequences[sequence.request_id]
        self._prefilling.pop(sequence, None)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        self.late.drop(sequence)
        self._memory.release(sequence)
        self._adapters.release(sequence)
        self._admitted.pop(sequence, None)
        _take_one(self._by_client, sequence.client)
        _take_one(self._by_priority, sequence.params.priority)
        self._growth -= sequence.expected_growth

    def take_admitted(self) -> list[Sequence]:
        """The sequences that have a slot and are not loading, save those of the last calls."""
        admitted = [sequence for sequence in self._admitted if not sequence.num_loading]
        for sequence in admitted:
            del self._admitted[sequence]
        return admitted

    def expect(self, sequence: Sequence) -> None:
        """Expect anew how much it will generate, as it has generated some."""
        growth = self._expected_growth(sequence)
        self._growth += growth - sequence.expected_growth
        sequence.expected_growth = growth

    def pages_to_spare(self, sequence: Sequence, without: ListOf[Sequence] = ()) -> int:
        """Pages to keep free so that running sequences can grow, but for some, and this one with them."""
        num_left = len(self) - len(without)
        if not num_left:
            return 0
        growth = self._growth + self._expected_growth(sequence) - sum(one.expected_growth for one in without)
        tables = (num_left + 1) * len(self._memory.groups.windows)
        return self._reserve.pages(growth, tables, self._memory.page_size)

    def decoding(self) -> list[Sequence]:
        """Those whose next token may be planned, if it has a page: with a constraint when the one
        before is sampled, and if it has not answered to that yet, there has to be room for the
        logits."""
        return [
            s
            for s in self
            if s.num_prefill_tokens <= s.num_computed_tokens < s.max_computed_tokens
            and (s.constraint is None or (not s.awaits_sample and (s.has_mask or self.late.has_room)))
        ]

    def prefilling(self) -> list[Sequence]:
        """Those that compute known tokens before they decode, and have what comes before these."""
        for sequence in [s for s in self._prefilling if not s.prefilling]:
            del self._prefilling[sequence]
        return [s for s in self._prefilling if not s.num_loading]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that those of ``prefilling`` have left to compute."""
        return sum(sequence.num_prefill_tokens - sequence.num_computed_tokens for sequence in self.prefilling())

    def will_end(self) -> list[Sequence]:
        """Those whose last token by length is in flight, or in the step being planned; not where
        nobody knows when it is sampled."""
        last = [s for s in self.decoding() if s.num_computed_tokens == s.max_computed_tokens - 1]
        planned = [s for s in last if s.num_computed_tokens < s.num_paged_tokens]
        return planned + [s for s in self if s.ends_by_length and not s.awaits_sample]

    @property
    def highest_priority(self) -> int:
        """The priority of the least important one."""
        return max(self._by_priority)

    def least_important(self, *, fair: bool) -> Sequence:
        """The first to be preempted: the last of those of the highest ``priority``.

        If ``fair``, it is the last of clients that have more than one of them and not less than an equal part of their
        pages: nobody gives up their only one for somebody else's many.
        """
        highest = self.highest_priority
        yielding = [s for s in self if s.params.priority == highest]
        by_client = defaultdict[str, list[Sequence]](list)
        for sequence in yielding:
            by_client[sequence.client].append(sequence)
        several = [of_client for of_client in by_client.values() if len(of_client) > 1]
        if fair and len(by_client) > 1 and several:
            pages = [self._memory.num_exclusive(of_client) for of_client in several]
            over = [of for of, count in zip(several, pages, strict=True) if count * len(pages) >= sum(pages)]
            yielding = list(chain.from_iterable(over))
        return max(yielding, key=_importance)

    def over_their_share(self, client: str, priority: int, gone: ListOf[Sequence] = ()) -> Iterator[Sequence]:
        """The sequences that yield to a client that runs nothing, one after the other, as if those before and those
        ``gone`` ran no more: the least important of the client that runs most, as long as that runs more than an equal
        share, and the sequence is of this priority or less important."""
        if client in self._by_client and not gone:
            return
        counts, own, excluded = Counter(self._by_client), dict[str, list[Sequence]](), set(gone)
        for sequence in gone:
            _take_one(counts, sequence.client)
        while counts and client not in counts:
            largest, count = counts.most_common(1)[0]
            if count <= max(1, counts.total() // (len(counts) + 1)):
                return
            if largest not in own:
                own[largest] = sorted((s for s in self if s.client == largest and s not in excluded), key=_importance)
            if own[largest][-1].params.priority < priority:
                return
            yield own[largest].pop()
            _take_one(counts, largest)

    def check_integrity(self) -> None:
        """Assert that slots are free or owned once, and that the counts are right."""
        taken = [sequence.slot for sequence in self]
        slots = taken + self._slots
        assert sorted(slots) == list(range(self._max_num_seqs)), f"slots are {taken} and {self._slots}"
        assert self._by_client == Counter(sequence.client for sequence in self), "a client's count is wrong"
        assert self._by_priority == Counter(sequence.params.priority for sequence in self), (
            "a priority's count is wrong"
        )
        prefilling = [s for s in self if s.prefilling]
        assert prefilling == [s for s in self._prefilling if s.prefilling], "a prompt is forgotten, or out of order"
        assert self._growth == sum(sequence.expected_growth for sequence in self), "the growth is wrong"

    def _expected_growth(self, sequence: Sequence) -> int:
        more = self._reserve.growth(len(sequence.output_token_ids), sequence.max_tokens)
        return self._memory.growth(sequence, more)


def _take_one(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _importance(sequence: Sequence) -> tuple[int, int]:
    return sequence.params.priority, sequence.arrival
