"""How other threads, and signals, wake the one that owns the sockets or waits for the end."""

import os
import select


class Bell:
    """A pipe to poll beside sockets (a self-pipe): any thread may ring it, one thread waits for
    it.

    A thread with work puts it into a queue and then rings. The waiting thread clears the bell and
    then empties the queue. In that order nothing is missed, and further rings before the clear
    cost no system call. The pipe lives as long as the bell, so a late ring never reaches another
    file.
    """

    def __init__(self) -> None:
        self._reader, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """The write end. A byte written to it rings too: it is for ``signal.set_wakeup_fd``."""
        self._rung = False

    def __del__(self) -> None:
        self._rung = True  # garbage is collected in any order: a ring after this must not write
        os.close(self._reader)
        os.close(self.write_fd)

    def fileno(self) -> int:
        """A file descriptor that is readable while a ring is unheard."""
        return self._reader

    def ring(self) -> None:
        """Wake the hearer, now or when it next polls."""
        if not self._rung:
            self._rung = True
            os.write(self.write_fd, b"\0")

    def clear(self) -> None:
        """Clear the ring. Call it when the bell is readable, before reading the queue."""
        os.read(self._reader, 4096)
        self._rung = False

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a ring, for ``timeout`` seconds at most, and clear it."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        if poll.poll(None if timeout is None else 1000 * timeout):
            self.clear()
