"""Waiting sequences of one priority, in the order in which they are to be admitted.

Preempted sequences come first, in the order in which they arrived. Then it is the turn of the
client that has been given the fewest tokens for its weight, of that client's users in turn, and of
a user's sequences in the order in which they arrived. This is the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models" (2024): what deficit round robin promises, without
a quantum to choose and a round to walk. A client that comes back begins where the others are, so
that nobody saves up turns by being idle.

Every operation costs O(log clients), however many sequences wait, most times.
"""

import heapq
import itertools
from collections import OrderedDict
from typing import NamedTuple

from engine.scheduling.sequence import Sequence

REMEMBERED = 1024
"""Clients with nothing waiting whose lead is remembered: those that were charged last."""


class UserTurns:
    """Waiting sequences of one client: its users take turns, one sequence of each after the other.

    So users have equal parts of their client's share, and a client that names more of them gets no
    more than before.
    """

    def __init__(self) -> None:
        self._users: OrderedDict[str, OrderedDict[str, Sequence]] = OrderedDict()
        """By user in the order of turns, by request id in the order of arrival; none is empty."""

    def __bool__(self) -> bool:
        return bool(self._users)

    def first(self) -> Sequence:
        """The sequence whose turn it is."""
        return next(iter(next(iter(self._users.values())).values()))

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Add a sequence behind its user's others or, if ``first``, before all."""
        waiting = self._users.setdefault(sequence.user, OrderedDict())
        waiting[sequence.request_id] = sequence
        if first:
            waiting.move_to_end(sequence.request_id, last=False)
            self._users.move_to_end(sequence.user, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; if it was its turn, the next turn is another user's."""
        waiting = self._users[sequence.user]
        had_turn = self.first() is sequence
        del waiting[sequence.request_id]
        if not waiting:
            del self._users[sequence.user]
        elif had_turn:
            self._users.move_to_end(sequence.user)


class Position(NamedTuple):
    """Where a sequence waits, so that it can be put back there."""

    preempted: bool
    """Whether among the preempted ones, first of all."""
    counter: float
    """Tokens for its weight that its client had been given."""


class ClientTurns:
    """Waiting sequences of one priority, by client."""

    def __init__(self) -> None:
        self._preempted: OrderedDict[str, Sequence] = OrderedDict()
        self._clients: dict[str, UserTurns] = {}
        self._counters: dict[str, float] = {}
        """Tokens given for the weight, of clients that wait and of others ahead of them."""
        self._heap: list[tuple[float, int, str]] = []
        """Counters of clients that wait, and older entries of theirs, which are invalid."""
        self._turns = itertools.count()
        self._reached = 0.0
        """The counter of the client whose turn was last: where new clients begin."""

    def __bool__(self) -> bool:
        return bool(self._preempted or self._clients)

    def add(self, client: str, sequence: Sequence, *, first: bool = False) -> None:
        """Add a sequence behind its user's others or, if ``first``, before all of its client's."""
        waiting = self._clients.get(client)
        if waiting is None:
            waiting = self._clients[client] = UserTurns()
            self._count(client, max(self._counters.get(client, 0.0), self._reached))
        waiting.add(sequence, first=first)

    def add_preempted(self, sequence: Sequence) -> None:
        """Add a sequence before all others but those preempted that came earlier."""
        preempted = [sequence, *self._preempted.values()]
        preempted.sort(key=lambda one: one.arrival)
        self._preempted = OrderedDict((one.request_id, one) for one in preempted)

    def head(self) -> Sequence:
        """The sequence whose turn it is."""
        if self._preempted:
            return next(iter(self._preempted.values()))
        return self._clients[self._next_client()].first()

    def newcomer(self) -> Sequence | None:
        """The sequence whose turn it would be, had none been preempted; None if all were."""
        return self._clients[self._next_client()].first() if self._clients else None

    def remove(self, client: str, sequence: Sequence) -> None:
        """Take a sequence out."""
        if self._preempted.pop(sequence.request_id, None) is not None:
            return
        waiting = self._clients[client]
        waiting.remove(sequence)
        if not waiting:
            del self._clients[client]

    def position(self, client: str, sequence: Sequence) -> Position:
        """Where a sequence waits, which is the first of all or of its client's."""
        return Position(sequence.request_id in self._preempted, self._counters.get(client, 0.0))

    def put_back(self, client: str, sequence: Sequence, position: Position, left_out: UserTurns | None) -> None:
        """Add a sequence where it was when it was taken out, and behind it what was ``left_out`` of its client."""
        waiting = self._clients.get(client)
        if waiting is None and (left_out is not None or not position.preempted):
            waiting = self._clients[client] = left_out or UserTurns()
            self._push(self._counters.setdefault(client, position.counter), client, first=True)
        if position.preempted:
            self._preempted[sequence.request_id] = sequence
            self._preempted.move_to_end(sequence.request_id, last=False)
        else:
            assert waiting is not None
            waiting.add(sequence, first=True)

    @property
    def num_clients(self) -> int:
        """Clients whose turn it may be."""
        return len(self._clients)

    def leave_out(self, client: str) -> UserTurns | None:
        """Take out all that a client has here but what was preempted, for ``put_back``."""
        return self._clients.pop(client, None)

    def begin(self, client: str, sequence: Sequence) -> None:
        """It is this sequence's turn: new clients from now on begin where its client is."""
        if sequence.request_id not in self._preempted:
            self._reached = max(self._reached, self._counters[client])

    def charge(self, client: str, tokens: float) -> None:
        """The client was given so many tokens for its weight."""
        self._count(client, max(self._counters.get(client, 0.0), self._reached) + tokens)

    def _next_client(self) -> str:
        while True:
            counter, _, client = self._heap[0]
            if client in self._clients and self._counters.get(client) == counter:
                return client
            heapq.heappop(self._heap)

    def _count(self, client: str, counter: float) -> None:
        self._counters.pop(client, None)  # so that the order is that of the last change
        self._counters[client] = counter
        if len(self._counters) > 2 * (len(self._clients) + REMEMBERED):
            self._forget()
        if client in self._clients:
            self._push(counter, client)

    def _push(self, counter: float, client: str, *, first: bool = False) -> None:
        """An entry for a client behind its equals, or before them."""
        turn = next(self._turns)
        heapq.heappush(self._heap, (counter, -turn if first else turn, client))
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
