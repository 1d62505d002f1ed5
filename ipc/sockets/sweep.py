"""Which connections a socket's process ends by itself: those that are silent, do not read, fill its
memory, or were told to end. No socket or clock in this file.

libzmq limits a frame and not a message, and shows nothing of a message before all of it is there:
one that never ends would take all memory there is. Such a connection is one from which bytes come and
no message does.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator

from ipc.sockets.connection_table import Accepted
from ipc.sockets.descriptors import num_unread, num_unsent
from ipc.sockets.router import HELLO_LIMIT

LOOK_INTERVAL = 0.25
"""Seconds between looks at the memory: in one, libzmq takes some 100 MiB of short frames."""
SWEEP_INTERVAL = 2.0
"""Seconds between checks for connections that are silent or do not read."""
READ_LIMIT = 30.0
"""Seconds within which a peer must read something of what was sent to it."""
MAX_MEMORY = 256 * 2**20
"""Resident bytes from which on it is too much; without clients it is a tenth of that."""
PRESSED_SILENCE_LIMIT = 10.0
"""Seconds that a connection may be silent where memory is too much: two pings."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


def takes_more_than(num_bytes: int) -> bool:
    """Whether this process is resident in more memory, without what it can give back."""
    if _resident_bytes() <= num_bytes:
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return _resident_bytes() > num_bytes


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


class Sweep:
    """Times are in seconds, and the caller's."""

    def __init__(
        self, silence_limit: float, now: float, takes_more_than: Callable[[int], bool] = takes_more_than
    ) -> None:
        self._silence_limit = silence_limit
        self._takes_more_than = takes_more_than
        self._looked_at = self._swept_at = now
        self.was_paused = False
        """Whether reading was paused at some time since the last of those checks."""

    @property
    def due_at(self) -> float:
        """When to call ``overdue`` next."""
        return self._looked_at + LOOK_INTERVAL

    def overdue(self, now: float, connections: list[Accepted], *, is_dropping: bool) -> Iterator[Accepted]:
        """The connections to end now; call it when it is due.

        A message that ``is_dropping`` is in memory until all of it is dropped.
        """
        self._looked_at = now
        is_pressed = self._takes_more_than(2 * MAX_MEMORY if is_dropping else MAX_MEMORY)
        if is_pressed:
            yield from filter(_brings_no_message, connections)
        if now >= self._swept_at + SWEEP_INTERVAL:
            yield from self._without_life(
                now, connections, PRESSED_SILENCE_LIMIT if is_pressed else self._silence_limit
            )

    def _without_life(self, now: float, connections: list[Accepted], silence_limit: float) -> Iterator[Accepted]:
        """If this call comes far too late, what they did not do does not count, and if reading was
        paused, their silence does not."""
        is_late = now > self._swept_at + 3 * SWEEP_INTERVAL
        excused = self.was_paused or is_late
        self._swept_at, self.was_paused = now, False
        for accepted in connections:
            unsent = num_unsent(accepted.descriptor)
            if is_late or not unsent or unsent != accepted.num_unsent:
                accepted.num_unsent, accepted.read_at = unsent, now
            if excused:
                accepted.last_received_at = now
            limit = HELLO_LIMIT if accepted.connection is None else silence_limit
            if now > min(
                accepted.last_received_at + limit, accepted.read_at + READ_LIMIT, accepted.ends_at or math.inf
            ):
                yield accepted


def _brings_no_message(accepted: Accepted) -> bool:
    """Whether there are bytes of it to read, as there were at an earlier look, and no message has
    come since."""
    if not num_unread(accepted.descriptor):
        return False
    was_sending, accepted.is_sending = accepted.is_sending, True
    return was_sending
