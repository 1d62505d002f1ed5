"""What the execution thread hears: commands as they come, and no more new requests than a step can begin."""

import queue
import threading

from driver.thread_messages import Admit, Inbound

MOST_AHEAD = 32
"""Admits that wait for the thread before those who prepare more wait for it: more than a step can begin, most times.

What is not prepared yet waits where clients take turns, and takes no processor from a step.
"""
AHEAD_PATIENCE = 0.5
"""Seconds that they wait at most, as for a command that takes minutes."""


class Inbox:
    """First in, first out. Any thread may put; one gets."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._num_ahead = 0
        self._fewer_ahead = threading.Condition()

    def __len__(self) -> int:
        return self._messages.qsize()

    def put(self, message: Inbound) -> None:
        """Put a message at once."""
        self._messages.put(message)

    def admit(self, message: Admit) -> None:
        """Put it once there are fewer than MOST_AHEAD, or after AHEAD_PATIENCE."""
        with self._fewer_ahead:
            self._fewer_ahead.wait_for(lambda: self._num_ahead < MOST_AHEAD, AHEAD_PATIENCE)
            self._num_ahead += 1
        self._messages.put(message)

    def get(self, *, block: bool, timeout: float | None) -> Inbound:
        """The oldest message; raises ``queue.Empty`` where there is none, or none in time."""
        message = self._messages.get(block, timeout)
        if isinstance(message, Admit):
            with self._fewer_ahead:
                self._num_ahead -= 1
                self._fewer_ahead.notify()
        return message
