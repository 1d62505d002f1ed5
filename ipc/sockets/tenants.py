"""Tenants and their limits: no socket, thread or clock in this file."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ipc.wire.keys import ALL, Limits

MINUTE = 60.0


@dataclass(frozen=True)
class Tenant:
    """The holder of a key, or any peer where no keys are required."""

    name: str
    limits: Limits | None = None
    """None is no limit at all."""
    user: int | None = None
    """The peer process's user by the kernel (SO_PEERCRED), known for ``ipc://`` only."""

    @property
    def may_control(self) -> bool:
        """Whether it may control the daemon: by its key, or as the daemon's own user or root."""
        return self.limits.control if self.limits is not None else self.user in (0, os.geteuid())

    @property
    def may_look(self) -> bool:
        """Whether it may read the daemon's status."""
        return self.limits is None or self.limits.control

    @property
    def adapters(self) -> Collection[str] | None:
        """The adapters that it may use, by name; None for all."""
        limits = self.limits
        return None if limits is None or limits.control or ALL in limits.adapters else limits.adapters

    @property
    def least_priority(self) -> int | None:
        """The lowest priority that its requests may have, which is served first; None for any."""
        if self.limits is None:
            return 0 if self.name else None
        return None if self.limits.control else self.limits.least_priority

    def refused_priority(self, priority: Any) -> str | None:
        """Why its requests may not have this priority; None if they may, or if it is none."""
        least = self.least_priority
        if least is None or not isinstance(priority, int) or priority >= least:
            return None
        why = (
            "what its key's `least_priority` allows"
            if self.limits is not None
            else "as it is not the daemon's own user"
        )
        return f"priority {priority} goes before others, and {self.name} may ask for {least} or more, {why}"


EVERYBODY = Tenant("")


def of_user(user: int | None) -> Tenant:
    """The tenant of a peer without a key, one per user; the daemon's own user has no limits.

    Where the kernel does not report the user, all are one tenant.
    """
    if user is None:
        return EVERYBODY
    return Tenant("" if user == os.geteuid() else f"uid {user}", user=user)


class Quota:
    """The tokens that one tenant has used: they drain at ``tokens_per_minute``, which is also the
    most at once.

    Times are in seconds, and the caller's.
    """

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now

    def spend(self, tokens: int) -> None:
        """Tokens have been used; a negative number corrects an estimate."""
        self._used += tokens

    def has_drained(self, tenant: Tenant, now: float) -> bool:
        """Whether all that was used has drained away."""
        if tenant.limits is None or tenant.limits.tokens_per_minute is None:
            return True
        return self._used <= tenant.limits.tokens_per_minute / MINUTE * (now - self._at)

    def refusal(
        self, tenant: Tenant, num_open: int, now: float, *, spends: bool = True
    ) -> tuple[str, float | None] | None:
        """Why one more request, which spends tokens or not, may not be opened, and in how many
        seconds it may; None if it may."""
        limits = tenant.limits
        if limits is None:
            return None
        if limits.max_requests is not None and num_open >= limits.max_requests:
            return f"key {tenant.name} may have {limits.max_requests} requests open at once: wait for one to end", None
        if limits.tokens_per_minute is None or not spends:
            return None
        rate = limits.tokens_per_minute / MINUTE
        self._used = max(0.0, self._used - rate * (now - self._at))
        self._at = now
        if self._used < limits.tokens_per_minute:
            return None
        wait = (self._used - limits.tokens_per_minute) / rate
        return f"key {tenant.name} has used its {limits.tokens_per_minute} tokens per minute: try again later", wait
