"""One question to the daemon, and where what comes back goes."""

from collections.abc import Callable

from ipc.connection.read_ahead import Unread
from ipc.connection.retry import Resumption
from ipc.errors import OdriverError
from ipc.wire.messages import Done, Token, TokenizerInfoReply, Welcome

Outcome = Token | Done | TokenizerInfoReply | Welcome | OdriverError | None
"""What the caller gets: an answer, an error in its place, or None after an abort."""
Put = Callable[[Outcome], None]
"""Takes an outcome, on any thread, without waiting or raising."""


class Call:
    """Outcomes come in order, and there is always a last: an answer that ends it, an error, or
    None."""

    def __init__(
        self,
        request_id: str,
        frame: bytes,
        put: Put,
        deadline: float,
        unread: Unread | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self.request_id = request_id
        self.frame = frame
        self.put = put
        self.deadline = deadline
        """When to give up, as long as there is no daemon to send it to."""
        self.not_before = 0.0
        """When to send it, the earliest."""
        self.unread = unread
        """The stream's untaken messages, which the reader takes with ``Connection.taken``; None
        for a single answer."""
        self.num_taken = 0
        """Pieces of it that have been taken; its reader alone counts."""
        self.resumption = resumption
        """How to resume it after a lost connection; None if it is not to be."""
