"""How much of a room with a bound one of those who share it may take.

Half of the room is for whoever comes first. From there on nobody takes more than their part: the room, divided by the
clients who hold some of it, and a client's part again by that client's users, so that nobody gains by inventing users.
Who is alone may fill it. Those who come to a room that another has filled still find an eighth more.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Holder = tuple[str, str]
"""A client, and a user of that client."""


class Share(NamedTuple):
    """What holds for one more, of one holder."""

    total: int
    """Held by all."""
    own: int
    """Held by this one."""
    part: int
    """What this one may hold, the room being so full."""
    fits: bool


def share(size: int, amount: int, holder: Holder, held: Iterable[tuple[Holder, int]]) -> Share:
    """Whether ``amount`` more of this holder fits into a room of that size, in which so much is held."""
    by_client: defaultdict[str, int] = defaultdict(int)
    by_user: defaultdict[str, int] = defaultdict(int)
    client, user = holder
    for (other, other_user), count in held:
        by_client[other] += count
        if other == client:
            by_user[other_user] += count
    total, own = sum(by_client.values()), by_user[user]
    clients_part = size // (len(by_client) + (client not in by_client))
    part = max(1, clients_part // len(by_user))
    fits = total + amount <= size // 2 or (
        own + amount <= part
        and by_client[client] + amount <= clients_part + clients_part // 8
        and total + amount <= most(size)
    )
    return Share(total, own, part, fits)


def most(size: int) -> int:
    """What a room of that size holds at most, whoever comes."""
    return size + size // 8
