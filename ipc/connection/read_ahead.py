"""How far a connection reads ahead of its streams' readers, and when it gives the daemon credit.

Below a limit of untaken bytes, credit is given for messages as they arrive, so a stream may end
before anybody reads it. Above the limit, credit is given for messages that are taken: then a slow
reader makes the daemon wait, and this process does not grow. A reader of streams one after the
other gives credit to the one being read.

Only the connection's thread uses this. No clock, socket or thread is in this file.
"""

from collections import deque
from collections.abc import Callable

from ipc.wire.messages import CREDITS

MAX_READ_AHEAD_BYTES = 8 << 20
"""Untaken bytes of a connection above which credit is withheld."""
CREDIT_STEP = CREDITS // 2
"""Messages of a stream that credit is given for at once; meanwhile the rest is on its way."""


class Unread:
    """Messages of one request's stream that have arrived and have not been taken."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_arrived = self.num_taken = 0
        """Messages."""
        self.num_credited = 0
        """Messages that credit has been given for."""
        self.sizes: deque[int] = deque()
        """Sizes in bytes of the untaken messages, in order."""
        self.is_dropped = False


class ReadAhead:
    """Counts the untaken bytes of all streams; ``give`` takes a request id and a credit."""

    def __init__(self, give: Callable[[str, int], None]) -> None:
        self._give = give
        self._withheld: set[Unread] = set()
        """Open streams whose credit waits for their reader."""
        self.num_bytes = 0
        """Untaken, of all streams."""

    @property
    def withholds(self) -> bool:
        """Whether credit is given only for taken messages."""
        return self.num_bytes >= MAX_READ_AHEAD_BYTES

    def begin(self, unread: Unread) -> None:
        """The daemon has been asked, for the first time or anew: it has all credit."""
        unread.num_credited = unread.num_arrived

    def skip(self, unread: Unread) -> None:
        """A message without anything new has arrived; nobody will take it."""
        unread.num_credited -= 1
        self._credit(unread)

    def arrive(self, unread: Unread, num_bytes: int) -> None:
        """One more message is about to be put where it is taken from."""
        unread.num_arrived += 1
        if not unread.is_dropped:
            unread.sizes.append(num_bytes)
            self.num_bytes += num_bytes
        self._credit(unread)

    def end(self, unread: Unread) -> None:
        """Nothing more comes of this stream, unless it is asked for anew."""
        self._withheld.discard(unread)

    def take(self, unread: Unread) -> None:
        """The oldest message has been taken; credit is given for an ended stream too."""
        if unread.is_dropped:
            return
        unread.num_taken += 1
        withheld = self.withholds
        self.num_bytes -= unread.sizes.popleft()
        if self.withholds:
            self._credit(unread, ended=unread not in self._withheld)
        elif withheld:
            self._release()

    def drop(self, unread: Unread) -> None:
        """Nothing more of this stream will be taken."""
        withheld = self.withholds
        unread.is_dropped = True
        self._withheld.discard(unread)
        self.num_bytes -= sum(unread.sizes)
        unread.sizes.clear()
        if withheld and not self.withholds:
            self._release()

    def _release(self) -> None:
        waiting, self._withheld = self._withheld, set()
        for unread in waiting:
            self._credit(unread)

    def _credit(self, unread: Unread, *, ended: bool = False) -> None:
        known = unread.num_taken if self.withholds else unread.num_arrived
        due = min(CREDITS, known - unread.num_credited)
        if due >= CREDIT_STEP:
            unread.num_credited += due
            self._give(unread.request_id, due)
        if self.withholds and not ended:
            self._withheld.add(unread)
