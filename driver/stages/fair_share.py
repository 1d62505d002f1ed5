"""Fair shares of a bounded capacity.

The first half of the capacity is first come, first served. Beyond it nobody gets more than a part:
the capacity divided by the clients that hold some of it, and a client's part divided by that
client's users, so that a client gains nothing by inventing users. A single client may have all. An
extra eighth is reserved for clients that come when it is full.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Holder = tuple[str, str]
"""A client, and a user of that client."""


class Share(NamedTuple):
    """The share of one holder that wants more."""

    total: int
    """Held by all."""
    own: int
    """Held by this holder."""
    part: int
    """What this holder may hold at present."""
    fits: bool


def share(size: int, amount: int, holder: Holder, held: Iterable[tuple[Holder, int]]) -> Share:
    """Whether this holder may take ``amount`` more of ``size``, of which ``held`` is taken."""
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
    """The most that all holders of a capacity of ``size`` may hold together."""
    return size + size // 8
