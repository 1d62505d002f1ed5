"""Sequences without a slot, in the order in which they are to get one.

- A lower ``priority`` comes first, as in vLLM.
- Of one priority, those come first that had a slot already and were preempted, in the order in which they arrived.
- Then it is the turn of the client that has been given the fewest tokens for its weight, of that client's users in turn,
  and of a user's sequences in the order in which they arrived. This is the virtual token counter of Sheng et al., "Fairness in Serving Large
  Language Models" (2024): what deficit round robin promises, without a quantum to choose and a round to walk. A client
  that comes back begins where the others are, so that nobody saves up turns by being idle.

Who cannot start although it is its turn may be passed by (``pass_by``): then the turn is the next one's, until
``come_back`` puts all that were passed by where they were.

Every operation costs O(log clients), however many wait, most times.
"""

import heapq
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine.scheduling.sequence import Sequence
from engine.scheduling.user_turns import UserTurns

OUTPUT_WEIGHT = 2
"""What a generated token counts, beside one of a prompt: the paper's figure."""

REMEMBERED = 1024
"""Clients without anything waiting whose lead is remembered: those that were charged last."""
REMEMBERED_LEVELS = 16
"""Priorities that nobody waits at whose clients' leads are remembered: those that were left last."""


class WaitingQueue:
    """See above. ``weights`` are shares by client; 1 is everybody else's."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, fair: bool = True) -> None:
        self._weights = weights or {}
        self._fair = fair
        self._sequences: dict[str, Sequence] = {}
        self._levels: dict[int, _Level] = {}
        """By priority, where somebody waits."""
        self._left: OrderedDict[int, _Level] = OrderedDict()
        """Where nobody does any more, those left last at the end."""
        self._priorities: list[int] = []
        self._passed_by: list[tuple[Sequence, _Place]] = []
        self.num_tokens = 0
        """Known tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order."""
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """A new sequence, behind its client's others of that priority."""
        self._note(sequence)
        self._level(sequence).add(self._client(sequence), sequence)

    def add_preempted(self, sequence: Sequence, *, before_all: bool) -> None:
        """One that had a slot: before all of its priority, or only before its own client's.

        Those that yield do so from the least important on, so the first is the most important one.
        """
        self._note(sequence)
        if before_all:
            self._level(sequence).add_preempted(sequence)
        else:
            self._level(sequence).add(self._client(sequence), sequence, first=True)

    def head(self) -> Sequence | None:
        """Whose turn it is."""
        return self._levels[self._priorities[0]].head() if self._priorities else None

    def newcomer(self) -> Sequence | None:
        """Whose turn it would be, had nobody been preempted; None where all that wait there were."""
        return self._levels[self._priorities[0]].newcomer() if self._priorities else None

    def pass_by(self, sequence: Sequence) -> None:
        """Whose turn it is, ``head``, cannot start now: it is the next one's turn."""
        level = self._levels[sequence.params.priority]
        self._passed_by.append((sequence, level.place(self._client(sequence), sequence)))
        self._leave(sequence)

    def come_back(self) -> None:
        """Those that were passed by are where they were."""
        for sequence, place in reversed(self._passed_by):
            self._level(sequence).put_back(self._client(sequence), sequence, place)
        self._passed_by.clear()

    @property
    def num_passed_by(self) -> int:
        """Those that have not come back."""
        return len(self._passed_by)

    def take(self, sequence: Sequence) -> None:
        """It is the turn of this one, ``head`` or ``newcomer``: take it out."""
        self._levels[sequence.params.priority].begin(self._client(sequence), sequence)
        self.remove(sequence.request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Take one out that is not passed by; None if it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.num_tokens -= sequence.num_tokens
            self._leave(sequence)
        return sequence

    def forget(self) -> None:
        """Nobody waits, and nobody is ahead of others any more."""
        assert not self._sequences, "somebody waits"
        self._left.clear()

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """The sequence's client was given so many tokens, among those of its priority."""
        client, priority = self._client(sequence), sequence.params.priority
        level = self._levels.get(priority, self._left.get(priority))
        if level is not None:
            level.charge(client, tokens / self._weights.get(client, 1.0))

    def _client(self, sequence: Sequence) -> str:
        return sequence.client if self._fair else ""

    def _note(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self.num_tokens += sequence.num_tokens

    def _level(self, sequence: Sequence) -> "_Level":
        """The one that it is about to wait at."""
        priority = sequence.params.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = self._left.pop(priority, _Level())
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


class _Place(NamedTuple):
    """Where somebody waits who is passed by."""

    preempted: bool
    """Before all of its priority."""
    counter: float
    """Its client's."""


class _Level:
    """Those of one priority."""

    def __init__(self) -> None:
        self._preempted: OrderedDict[str, Sequence] = OrderedDict()
        self._clients: dict[str, UserTurns] = {}
        self._counters: dict[str, float] = {}
        """Tokens given for the weight; of clients that wait, and of others that are ahead of them."""
        self._heap: list[tuple[float, int, str]] = []
        """Counters of clients that wait, and older entries of theirs, which are none any more."""
        self._turns = itertools.count()
        self._reached = 0.0
        """The counter of the client whose turn it was last: where who comes new begins."""

    def __bool__(self) -> bool:
        return bool(self._preempted or self._clients)

    def add(self, client: str, sequence: Sequence, *, first: bool = False) -> None:
        own = self._clients.get(client)
        if own is None:
            own = self._clients[client] = UserTurns()
            self._count(client, max(self._counters.get(client, 0.0), self._reached))
        own.add(sequence, first=first)

    def add_preempted(self, sequence: Sequence) -> None:
        self._preempted[sequence.request_id] = sequence
        self._preempted.move_to_end(sequence.request_id, last=False)

    def head(self) -> Sequence:
        if self._preempted:
            return next(iter(self._preempted.values()))
        return self._first(self._next_client())

    def newcomer(self) -> Sequence | None:
        return self._first(self._next_client()) if self._clients else None

    def _first(self, client: str) -> Sequence:
        return self._clients[client].first()

    def remove(self, client: str, sequence: Sequence) -> None:
        if self._preempted.pop(sequence.request_id, None) is not None:
            return
        own = self._clients[client]
        own.remove(sequence)
        if not own:
            del self._clients[client]

    def place(self, client: str, sequence: Sequence) -> _Place:
        """Where it waits, first of all or first of its client's."""
        return _Place(sequence.request_id in self._preempted, self._counters.get(client, 0.0))

    def put_back(self, client: str, sequence: Sequence, place: _Place) -> None:
        """It waits there again."""
        if place.preempted:
            self.add_preempted(sequence)
            return
        own = self._clients.get(client)
        if own is None:
            own = self._clients[client] = UserTurns()
            counter = self._counters.setdefault(client, place.counter)
            heapq.heappush(self._heap, (counter, -next(self._turns), client))  # before its equals, as it was
        own.add(sequence, first=True)

    def begin(self, client: str, sequence: Sequence) -> None:
        """It is this one's turn: who comes new from now on begins where its client was."""
        if sequence.request_id not in self._preempted:
            self._reached = max(self._reached, self._counters[client])

    def charge(self, client: str, tokens: float) -> None:
        self._count(client, max(self._counters.get(client, 0.0), self._reached) + tokens)
        if len(self._counters) > 2 * (len(self._clients) + REMEMBERED):
            self._forget()

    def _next_client(self) -> str:
        while True:
            counter, _, client = self._heap[0]
            if client in self._clients and self._counters.get(client) == counter:
                return client
            heapq.heappop(self._heap)

    def _count(self, client: str, counter: float) -> None:
        self._counters.pop(client, None)  # so that the order is that of the last change
        self._counters[client] = counter
        if client in self._clients:
            heapq.heappush(self._heap, (counter, next(self._turns), client))
            if len(self._heap) > 2 * (len(self._clients) + REMEMBERED):
                self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        latest: dict[str, tuple[float, int, str]] = {}
        for entry in sorted(self._heap):
            if entry[2] in self._clients and self._counters[entry[2]] == entry[0]:
                latest.setdefault(entry[2], entry)
        self._heap = list(latest.values())  # in order, so it is a heap

    def _forget(self) -> None:
        latest = set(list(self._counters)[-REMEMBERED:])
        self._counters = {
            client: counter
            for client, counter in self._counters.items()
            if client in self._clients or (client in latest and counter > self._reached)
        }
