"""Why running sequences were sent back to wait, and how the log tells of it."""

import logging
import math
from enum import StrEnum

import msgspec

logger = logging.getLogger(__name__)

WARNING_INTERVAL = 60.0
"""Seconds between two warnings of a famine."""


class Cause(StrEnum):
    """Who got what the sequence gave up."""

    PAGES = "pages"
    """A more important sequence, which found no free page for its next token."""
    PRIORITY = "priority"
    """One of a priority lower by the threshold or more."""
    FAIRNESS = "fairness"
    """A client that had no slot while another had more than its share."""
    CACHE_LOST = "cache_lost"
    """Nobody: the memory behind the pages was lost."""


_CAUSES = {
    Cause.PAGES: "no page was free for a more important one",
    Cause.PRIORITY: "for one of a much lower priority",
    Cause.FAIRNESS: "for a client that had nothing running",
    Cause.CACHE_LOST: "the cache was lost",
}


class Preemption(msgspec.Struct, frozen=True):
    """One such event."""

    request_id: str
    client: str
    cause: Cause
    num_tokens: int
    """Tokens that it had: to be found in the cache, or computed, again."""
    num_pages: int
    """Pages that it gave up."""


class PreemptionLog:
    """Says each preemption, and at most once a minute what an operator can do about a famine of pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pool = f"{num_pages:,} pages of {page_size} tokens"
        self._warned_at = -math.inf
        self._famines = 0

    def tell(self, events: list[Preemption], num_running: int, now: float) -> None:
        """Log these events; ``now`` is in seconds."""
        for event in events:
            logger.info(
                "request %s was preempted (%s): it gives up %d pages, waits in front of %s, and goes on from what the "
                "cache then still has of its %d tokens",
                event.request_id, _CAUSES[event.cause], event.num_pages, _before(event), event.num_tokens,
                extra={"request_id": event.request_id, "client": event.client},
            )  # fmt: skip
            self._famines += event.cause is Cause.PAGES
        if self._famines and now - self._warned_at >= WARNING_INTERVAL:
            logger.warning(
                "the pages do not suffice: preempted since the last warning: %d, running now: %d, in %s. Nothing is lost, "
                "but work is done twice. Should it go on: more pages (--num-pages, --hbm-utilization), fewer sequences at "
                "once (--max-num-seqs), or a lower max_tokens in requests",
                self._famines, num_running, self._pool,
            )  # fmt: skip
            self._warned_at, self._famines = now, 0


def _before(event: Preemption) -> str:
    return "its client's others" if event.cause is Cause.FAIRNESS else "the others"
