"""What the grammar of one request may take of the workers that all share."""

from driver.grammars.grammar_protocol import MEMORY_BYTES

FREE_SECONDS = 0.002
"""Of processor time a token: what takes more than that adds to the debt, what takes less pays off."""
HEAVY_SECONDS = 0.1
"""A debt with which a request goes where it slows down no quick ones."""
MOST_SECONDS = 60.0
"""A debt with which it ends."""
HEAVY_KIBIBYTES = 128 << 10
MOST_DEATHS, MOST_ACCIDENTS = 2, 8
"""Workers that may end while they work for a request: by themselves, and by SIGKILL, which is another's, but may be the
system's for want of memory."""
TOKEN_SECONDS = 1.0
"""Of processor time, for one token."""
TOO_HARD = (
    f"it takes more than {TOKEN_SECONDS:g} second a token, {MOST_SECONDS:g} seconds or {MEMORY_BYTES >> 30} GiB "
    "to tell what may come next: make it simpler"
)


class Allowance:
    """One account for all samples of a request. One thread writes it."""

    def __init__(self, *, heavy: bool = False) -> None:
        self.heavy = heavy
        """Whether it is followed beside other heavy ones, for good."""
        self._debt = 0.0
        self._kibibytes = 0
        self._deaths = self._accidents = 0

    @property
    def spent(self) -> bool:
        """Whether it has had all that it may have."""
        return self._debt > MOST_SECONDS or self._deaths >= MOST_DEATHS or self._accidents >= MOST_ACCIDENTS

    def charge(self, seconds: float, kibibytes: int) -> None:
        """An answer has taken so much time, and has made a worker so much larger than it ever was."""
        self._debt = max(0.0, self._debt + seconds - FREE_SECONDS)
        self._kibibytes += kibibytes
        if self._debt > HEAVY_SECONDS or self._kibibytes > HEAVY_KIBIBYTES:
            self.heavy = True

    def blame(self, *, accident: bool) -> None:
        """A worker has ended in the middle of it."""
        if accident:
            self._accidents += 1
        else:
            self._deaths += 1
