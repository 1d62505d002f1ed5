"""Fair shares of a bounded capacity.

The first half of the capacity is first come, first served. Beyond it nobody gets more than a part:
the capacity divided by the clients that hold some of it, and a client's part divided by that
client's users, so that a client gains nothing by inventing users. A single client may have all. An
extra eighth is reserved for clients that come when it is full.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

Holder = tuple[str, str]
"""A client, and a user of that client."""
NOBODY: Mapping[str, int] = {}
"""What the users of a client hold that holds nothing."""


class Share(NamedTuple):
    """The share of one holder that wants more."""

    total: int
    """Held by all."""
    own: int
    """Held by this holder."""
    part: int
    """The most that this holder may hold at present."""
    fits: bool


class Holdings:
    """What each holder has of a capacity. One thread at a time.

    Every operation takes the same time, however much is held and by however many.
    """

    def __init__(self) -> None:
        self._users: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By client, what each user holds; none is 0."""
        self._clients: Counter[str] = Counter()
        self.total = 0
        """Held by all."""

    def share(self, size: int, amount: int, holder: Holder) -> Share:
        """Whether this holder may take ``amount`` more of ``size``."""
        client, user = holder
        users = self._users.get(client, NOBODY)
        own, held = users.get(user, 0), self._clients[client]
        clients_part = size // (len(self._clients) + (client not in self._clients))
        part = max(1, clients_part // (len(users) + (user not in users)))
        fits = self.total + amount <= size // 2 or (
            own + amount <= part
            and held + amount <= clients_part + clients_part // 8
            and self.total + amount <= most(size)
        )
        return Share(self.total, own, part, fits)

    def take(self, amount: int, holder: Holder) -> None:
        """This holder has ``amount`` more, whatever its share is."""
        if not amount:
            return
        client, user = holder
        self.total += amount
        self._clients[client] += amount
        self._users[client][user] += amount

    def give_back(self, amount: int, holder: Holder) -> None:
        """This holder has ``amount`` less, which it has taken."""
        if not amount:
            return
        client, user = holder
        self.total -= amount
        self._clients[client] -= amount
        self._users[client][user] -= amount
        if not self._users[client][user]:
            del self._users[client][user]
        if not self._clients[client]:
            del self._clients[client], self._users[client]


def most(size: int) -> int:
    """The most that all holders of a capacity of ``size`` may hold together."""
    return size + size // 8
