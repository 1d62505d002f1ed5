"""The scheduler's and the device's account of the copies between device and host, held together."""

from typing import Any

from engine.scheduling.host_cache.host_pages import HostPages
from engine.scheduling.plan import NextIterationPlan
from engine.step.host_cache.host_slots import HostMemory


class HostLink:
    """Tells the scheduler which copies have arrived, and what steps cost beside them."""

    def __init__(self, pages: HostPages, memory: HostMemory) -> None:
        self._pages = pages
        self._memory = memory

    @property
    def is_copying(self) -> bool:
        """Whether copies have not arrived."""
        return self._memory.is_copying

    @property
    def is_loading(self) -> bool:
        """Whether pages or states are on their way to the device."""
        return self._pages.num_under_way > 0

    def land(self) -> None:
        """Let the scheduler know which copies have arrived."""
        self._pages.landed(self._memory.take_landed())

    def wait(self) -> None:
        """Until the next copies to the device have arrived; to the host if there are none."""
        self._memory.wait()

    def learn(self, plan: NextIterationPlan, seconds: float) -> None:
        """A step has landed that took so long."""
        self._pages.cost.learn(plan.num_tokens - plan.num_decode_tokens, plan.num_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        """The part of EngineStats that is about the host's memory."""
        tier, states, memory = self._pages.tier, self._pages.state_tier, self._memory
        tiers = [tier] if states is None else [tier, states]
        return {
            "host_pages_total": tier.num_slots,
            "host_pages_cached": tier.num_kept,
            "host_states_total": 0 if states is None else states.num_slots,
            "host_states_cached": 0 if states is None else states.num_kept,
            "host_bytes_stored": sum(each.pages_stored * each.page_bytes for each in tiers),
            "host_bytes_loaded": sum(each.pages_loaded * each.page_bytes for each in tiers),
            "host_seconds_stored": memory.seconds_stored,
            "host_seconds_loaded": memory.seconds_loaded,
            "host_pages_lost": tier.pages_lost,
            "host_states_lost": 0 if states is None else states.pages_lost,
            "host_page_bytes": tier.page_bytes,
            "host_state_bytes": 0 if states is None else states.page_bytes,
            "host_cache_queries": self._pages.tokens_looked_up,
            "host_cache_hits": self._pages.tokens_found,
        }


def host_link(pages: HostPages | None, memory: HostMemory | None) -> HostLink | None:
    """None where there is no tier."""
    return None if pages is None or memory is None else HostLink(pages, memory)
