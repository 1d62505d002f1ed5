"""Sequences without a slot, in the order in which they are to be admitted.

A lower ``priority`` comes first, as in vLLM. Within a priority, clients and users take turns
(``client_turns``). A sequence whose turn it is and that cannot start now may be passed by: then it
is the next one's turn, until ``come_back`` puts all that were passed by where they were.
"""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting.client_turns import ClientTurns, Position, UserTurns

OUTPUT_WEIGHT = 2
"""What a generated token counts, beside one of a prompt: the figure of Sheng et al. (2024)."""
MOST_PASSED_OF_CLIENT = 16
"""Sequences of one client that are passed by in a plan where others wait: what keeps them, such as an adapter without
a slot, is likely to keep the rest, and nobody else is to wait for all of them to be looked at."""
REMEMBERED_LEVELS = 16
"""Priorities without waiting sequences whose clients' leads are remembered, the last ones."""


class WaitingQueue:
    """The waiting queue. ``weights`` are shares by client; 1 is everybody else's.

    Unless ``fair``, sequences of all clients wait as if they were one client's.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, fair: bool = True) -> None:
        self._weights = weights or {}
        self._fair = fair
        self._sequences: dict[str, Sequence] = {}
        self._levels: dict[int, ClientTurns] = {}
        """By priority, where sequences wait."""
        self._left: OrderedDict[int, ClientTurns] = OrderedDict()
        """By priority, where none wait any more, those left last at the end."""
        self._priorities: list[int] = []
        self._passed_by: list[tuple[Sequence, Position, UserTurns | None]] = []
        """With what was left out of its client then, as enough of it was passed by and others wait."""
        self._passed_of: Counter[tuple[int, str]] = Counter()
        """Of those, how many by priority and client."""
        self.num_tokens = 0
        """Known tokens of all waiting sequences."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no order."""
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence behind its user's others of that priority."""
        sequence.num_charged_tokens = len(sequence.output_token_ids)
        self._note(sequence)
        self._level(sequence).add(self._client(sequence), sequence)

    def add_preempted(self, sequence: Sequence, *, before_all: bool) -> None:
        """Add a preempted sequence: before all of its priority, or only before its own client's.

        The least important sequences are preempted first, so the first to wait is the most
        important.
        """
        self._note(sequence)
        if before_all:
            self._level(sequence).add_preempted(sequence)
        else:
            self._level(sequence).add(self._client(sequence), sequence, first=True)

    def head(self) -> Sequence | None:
        """The sequence whose turn it is."""
        return self._levels[self._priorities[0]].head() if self._priorities else None

    def newcomer(self) -> Sequence | None:
        """The sequence whose turn it would be, had none been preempted; None if all were."""
        return self._levels[self._priorities[0]].newcomer() if self._priorities else None

    def pass_by(self, sequence: Sequence) -> None:
        """The ``head`` cannot start now: it is the next one's turn."""
        priority, client = sequence.params.priority, self._client(sequence)
        level, left_out = self._levels[priority], None
        position = level.position(client, sequence)
        self._passed_of[priority, client] += 1
        if self._passed_of[priority, client] >= MOST_PASSED_OF_CLIENT and level.num_clients > 1:
            level.remove(client, sequence)
            left_out = level.leave_out(client)
        else:
            self._leave(sequence)
        self._passed_by.append((sequence, position, left_out))

    def come_back(self) -> None:
        """Put the sequences that were passed by where they were."""
        for sequence, position, left_out in reversed(self._passed_by):
            self._level(sequence).put_back(self._client(sequence), sequence, position, left_out)
        self._passed_by.clear()
        self._passed_of.clear()

    @property
    def num_passed_by(self) -> int:
        """Sequences passed by that have not come back."""
        return len(self._passed_by)

    def take(self, sequence: Sequence) -> None:
        """Admit a sequence, as it is its turn: take it out."""
        self._levels[sequence.params.priority].begin(self._client(sequence), sequence)
        self.remove(sequence.request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Take out a sequence that is not passed by; None if it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.num_tokens -= sequence.num_tokens
            self._leave(sequence)
        return sequence

    def add_tokens(self, count: int) -> None:
        """So many tokens of a sequence that was preempted meanwhile have landed."""
        self.num_tokens += count

    def forget(self) -> None:
        """Forget which clients are ahead of others, as nothing waits or runs."""
        assert not self._sequences, "a sequence waits"
        self._left.clear()

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """The sequence's client was given so many tokens, among those of its priority."""
        client, priority = self._client(sequence), sequence.params.priority
        level = self._levels.get(priority, self._left.get(priority))
        if level is not None:
            level.charge(client, tokens / self._weights.get(client, 1.0))

    def charge_output(self, sequence: Sequence) -> None:
        """Charge the sequence's client for generated tokens that it was not charged for."""
        tokens = len(sequence.output_token_ids) - sequence.num_charged_tokens
        self.charge(sequence, OUTPUT_WEIGHT * tokens)
        sequence.num_charged_tokens += tokens

    def check_integrity(self) -> None:
        """Assert that waiting sequences hold nothing and are counted right."""
        assert all(not s.pages and s.slot < 0 for s in self), "a waiting sequence holds something"
        assert not self._passed_by, "a sequence that was passed by has not come back"
        tokens = sum(sequence.num_tokens for sequence in self)
        assert self.num_tokens == tokens, f"{self.num_tokens} tokens were counted, but {tokens} wait"

    def _client(self, sequence: Sequence) -> str:
        return sequence.client if self._fair else ""

    def _note(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self.num_tokens += sequence.num_tokens

    def _level(self, sequence: Sequence) -> ClientTurns:
        """Where the sequence is about to wait."""
        priority = sequence.params.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = self._left.pop(priority, ClientTurns())
            insort(self._priorities, priority)
        return level

    def _leave(self, sequence: Sequence) -> None:
        priority = sequence.params.priority
        level = self._levels[priority]
        level.remove(self._client(sequence), sequence)
        if not level:
            self._left[priority] = self._levels.pop(priority)
            self._priorities.remove(priority)
            if len(self._left) > REMEMBERED_LEVELS:
                self._left.popitem(last=False)
