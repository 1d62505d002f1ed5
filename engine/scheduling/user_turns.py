"""The sequences of one client that wait: its users take turns, one sequence of each after the other.

So users have equal parts of their client's share, and a client that says it has more of them has no more than before.
"""

from collections import OrderedDict

from engine.scheduling.sequence import Sequence


class UserTurns:
    """By user, whose turn it is first, in the order of arrival."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, OrderedDict[str, Sequence]] = OrderedDict()
        """None is empty."""

    def __bool__(self) -> bool:
        return bool(self._users)

    def first(self) -> Sequence:
        """Whose turn it is."""
        return next(iter(next(iter(self._users.values())).values()))

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Behind its user's others; or, ``first``, before all."""
        own = self._users.setdefault(sequence.user, OrderedDict())
        own[sequence.request_id] = sequence
        if first:
            own.move_to_end(sequence.request_id, last=False)
            self._users.move_to_end(sequence.user, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take it out; if it was its turn, the next is that of another user."""
        own = self._users[sequence.user]
        had_turn = self.first() is sequence
        del own[sequence.request_id]
        if not own:
            del self._users[sequence.user]
        elif had_turn:
            self._users.move_to_end(sequence.user)
