"""The gateway's memory for open requests: their bodies, and answers that are sent whole."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from driver.stages.fair_share import Holder, share
from ipc.openai.request_bodies import BodyError
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
        self._serials = itertools.count()
        self._held: dict[int, tuple[Holder, int]] = {}
        self._total = 0

    @contextmanager
    def hold(self, peer: str) -> Iterator["HeldMemory"]:
        """For the time of one request of this peer."""
        held = HeldMemory(self, next(self._serials), (peer, ""))
        try:
            yield held
        finally:
            _, count = self._held.pop(held.serial, (held.holder, 0))
            self._total -= count

    def add(self, held: "HeldMemory", count: int) -> None:
        """Add this many bytes; raises Full."""
        if self._total + count > MAX_BYTES // 2:
            found = share(MAX_BYTES, count, held.holder, self._held.values())
            if not found.fits:
                raise Full(
                    f"requests and answers of {found.total >> 20} MiB are held already, {found.own >> 20} MiB of them"
                    " yours: try again later, and have long answers streamed"
                )
        _, before = self._held.get(held.serial, (held.holder, 0))
        self._held[held.serial] = held.holder, before + count
        self._total += count


class HeldMemory:
    """The memory that one request holds."""

    def __init__(self, memory: Memory, serial: int, holder: Holder) -> None:
        self.serial = serial
        self.holder = holder
        self._memory = memory

    def add(self, count: int) -> None:
        """Add this many bytes of a body; raises Full."""
        self._memory.add(self, count)

    def add_piece(self, piece: Piece) -> None:
        """A piece of an answer; raises Full."""
        self._memory.add(self, num_bytes(piece))


def held_by(request: Request) -> HeldMemory:
    """The memory held by this request."""
    held: HeldMemory = request.state.held
    return held
