"""The scheduler's and the device's account of the copies between device and host, held together."""

import time

from caching.host_tier import HostTier
from engine.scheduling.host_cache.host_pages import HostPages
from engine.scheduling.plan import NextIterationPlan
from engine.step.host_cache.page_copies import HostMemory


class HostLink:
    """Tells the scheduler which copies have arrived, and what steps cost beside them."""

    def __init__(self, tier: HostTier, pages: HostPages, memory: HostMemory) -> None:
        self._tier = tier
        self._pages = pages
        self._memory = memory
        self._step_ended_at = 0.0

    @property
    def is_copying(self) -> bool:
        """Whether copies have not arrived."""
        return self._memory.is_copying

    @property
    def is_loading(self) -> bool:
        """Whether pages are on their way to the device."""
        return self._pages.num_under_way > 0

    def land(self) -> None:
        """Let the scheduler know which copies have arrived."""
        self._pages.landed(*self._memory.take_landed())

    def wait(self) -> None:
        """Until the next pages have arrived on the device; on the host if none are on their way there."""
        self._memory.wait()

    def learn(self, plan: NextIterationPlan, begun_at: float) -> None:
        """A step has landed just now that was begun at ``begun_at``, of ``time.perf_counter``."""
        now = time.perf_counter()
        seconds, self._step_ended_at = now - max(begun_at, self._step_ended_at), now
        self._pages.cost.learn(plan.num_tokens - plan.num_decodes, plan.num_tokens, seconds)

    def stats(self) -> dict[str, int]:
        """The part of EngineStats that is about the host's memory."""
        tier, pages = self._tier, self._pages
        return {
            "host_pages_total": tier.num_slots,
            "host_pages_cached": tier.num_kept,
            "host_bytes_stored": tier.pages_stored * tier.page_bytes,
            "host_bytes_loaded": tier.pages_loaded * tier.page_bytes,
            "host_pages_lost": tier.pages_lost,
            "host_page_bytes": tier.page_bytes,
            "host_cache_queries": pages.tokens_looked_up,
            "host_cache_hits": pages.tokens_found,
        }


def host_link(tier: HostTier | None, pages: HostPages | None, memory: HostMemory | None) -> HostLink | None:
    """None where there is no tier."""
    if tier is None or pages is None or memory is None:
        return None
    return HostLink(tier, pages, memory)
