"""How other threads wake the one that owns the sockets."""

import os


class Bell:
    """A file descriptor to poll beside sockets; any thread may ring it, one thread hears it.

    Whoever has work for the hearer puts it into a queue and then rings; the hearer, woken, clears the bell and
    then empties the queue. In that order nothing is missed, though rings while one is unheard cost no system call.
    The descriptor lives as long as the bell has an owner, so a late ring never reaches somebody else's file.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """The descriptor: readable while a ring is unheard."""
        return self._fd

    def ring(self) -> None:
        """Wake the hearer, now or when it next polls."""
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Hear the ring; to be called when the descriptor is readable, before looking into the queue."""
        os.eventfd_read(self._fd)
        self._rung = False
