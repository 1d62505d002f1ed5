"""Exceptions on a socket thread end the one request that they are about."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from driver.errors import DriverError
from driver.stages.stage import Stage
from ipc.wire.codec import peek_request_id


@dataclass(eq=False)
class Work:
    """Something to ``do`` for one client: about one of its requests, or about its connection where
    none is named.

    ``frames`` are those of the message that it is about, if it is; the request is looked for
    there.
    """

    identity: bytes
    tenant: str
    do: Callable[[], None]
    request_id: str | None = None
    frames: list[bytes] = field(default_factory=list)

    @cached_property
    def about(self) -> str | None:
        """The request's id."""
        return peek_request_id(self.frames[0]) if len(self.frames) == 1 else self.request_id

    @property
    def source(self) -> tuple[str, str]:
        """The tenant and the request, for the log."""
        return self.tenant or self.identity.hex(), self.about or ""


def isolating(name: str, end: Callable[[bytes, str | None, DriverError], None]) -> Stage[Work]:
    """A stage that runs Work; ``end`` ends a client's request, or its connection."""
    return Stage(
        name,
        lambda work: work.do(),
        lambda work, error: end(work.identity, work.about, error),
        lambda work: work.source,
    )
