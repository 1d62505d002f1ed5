"""The gateway's memory for open requests: their bodies, and answers that are sent whole."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from driver.stages.fair_share import Holder, Holdings
from ipc.openai.question import BodyError
from ipc.wire.completion import Piece, num_bytes

MAX_BYTES = 256 << 20
"""About, for all requests. Above half of it shares are fair (driver/stages/fair_share.py)."""
RETRY_AFTER = 1.0


class Full(BodyError):
    """There is no room for more of this one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, code="overloaded")
        self.retry_after = RETRY_AFTER


class Memory:
    """Counts what each request holds; the event loop's thread alone uses it."""

    def __init__(self) -> None:
        self._holdings = Holdings()

    @contextmanager
    def hold(self, peer: str) -> Iterator["HeldMemory"]:
        """For the time of one request of this peer."""
        held = HeldMemory(self._holdings, (peer, ""))
        try:
            yield held
        finally:
            held.give_back()


class HeldMemory:
    """The memory that one request holds."""

    def __init__(self, holdings: Holdings, holder: Holder) -> None:
        self._holdings = holdings
        self._holder = holder
        self._count = 0

    def add(self, count: int) -> None:
        """Add this many bytes of a body; raises Full."""
        found = self._holdings.share(MAX_BYTES, count, self._holder)
        if not found.fits:
            raise Full(
                f"requests and answers of {found.total >> 20} MiB are held already, {found.own >> 20} MiB of them"
                " yours: try again later, and have long answers streamed"
            )
        self._holdings.take(count, self._holder)
        self._count += count

    def add_piece(self, piece: Piece) -> None:
        """A piece of an answer; raises Full."""
        self.add(num_bytes(piece))

    def give_back(self) -> None:
        """The request is over."""
        self._holdings.give_back(self._count, self._holder)


def held_by(request: Request) -> HeldMemory:
    """The memory held by this request."""
    held: HeldMemory = request.state.held
    return held
