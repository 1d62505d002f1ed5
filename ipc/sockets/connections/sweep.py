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

from ipc.sockets.connections.connection_table import Accepted
from ipc.sockets.connections.descriptors import num_unread, num_unsent
from ipc.sockets.router import HELLO_LIMIT

LOOK_INTERVAL = 0.25
"""Seconds between looks at the memory: in one, libzmq takes some 100 MiB of short frames."""
SWEEP_INTERVAL = 2.0
"""Seconds between checks for connections that are silent or do not read."""
FULL_LIMIT = 120.0
"""Seconds within which a full connection has to take another message: its peer has 8 MiB to read until then, and
whoever reads so slowly gives credit. The level in the kernel's buffer says nothing: libzmq fills it again to the byte."""
MAX_MEMORY, MAX_KNOWN = 256 * 2**20, 2**30
"""Resident bytes from which on it is too much, beside what connections are known to take, of which no more than so many
count; without clients it is a tenth of the former."""
CONNECTION_BYTES = 48 * 2**10
"""That a connection takes by itself."""
PRESSED_LIMIT = 10.0
"""Seconds that a connection may be silent, or full, where memory is too much: two pings."""

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
        self.was_drained = True
        """Whether all messages that there were had been received, at some time since the last look."""

    @property
    def due_at(self) -> float:
        """When to call ``overdue`` next."""
        return self._looked_at + LOOK_INTERVAL

    def overdue(self, now: float, connections: list[Accepted], *, is_dropping: bool) -> Iterator[Accepted]:
        """The connections to end now; call it when it is due.

        A message that ``is_dropping`` is in memory until all of it is dropped, and so are messages
        that have yet to be received.
        """
        self._looked_at = now
        waits_for_us, self.was_drained = is_dropping or not self.was_drained, False
        limit, own = (2 if waits_for_us else 1) * MAX_MEMORY, CONNECTION_BYTES * len(connections)
        is_pressed = self._takes_more_than(limit + min(MAX_KNOWN, own)) and self._takes_more_than(
            limit + min(MAX_KNOWN, own + sum(map(_bytes_for, connections)))
        )
        if is_pressed:
            yield from filter(_brings_no_message, connections)
        if now >= self._swept_at + SWEEP_INTERVAL:
            yield from self._without_life(now, connections, is_pressed=is_pressed)

    def _without_life(self, now: float, connections: list[Accepted], *, is_pressed: bool) -> Iterator[Accepted]:
        """If this call comes far too late, what they did not do does not count, and if reading was
        paused, their silence does not."""
        is_late = now > self._swept_at + 3 * SWEEP_INTERVAL
        excused = self.was_paused or is_late
        self._swept_at, self.was_paused = now, False
        for accepted in connections:
            connection, ends_at = accepted.connection, accepted.ends_at or math.inf
            if excused:
                accepted.last_received_at = now
            if connection is None:
                limit = HELLO_LIMIT
            else:
                limit = PRESSED_LIMIT if is_pressed else self._silence_limit
                if is_late:
                    connection.waits_since = now
                if connection.held:
                    ends_at = min(ends_at, connection.waits_since + (PRESSED_LIMIT if is_pressed else FULL_LIMIT))
            if now > min(accepted.last_received_at + limit, ends_at):
                yield accepted


def _bytes_for(accepted: Accepted) -> int:
    """What is inside of a connection, and held for it, at most."""
    connection = accepted.connection
    if connection is None:
        return 0
    is_empty = not connection.num_bytes_sent or not num_unsent(accepted.descriptor)
    return connection.num_bytes_held + (0 if is_empty else connection.num_bytes_sent)


def _brings_no_message(accepted: Accepted) -> bool:
    """Whether there are bytes of it to read, as there were at an earlier look, and no message has
    come since."""
    if not num_unread(accepted.descriptor):
        return False
    was_sending, accepted.is_sending = accepted.is_sending, True
    return was_sending
