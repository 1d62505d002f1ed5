"""The tier of the prefix cache in the host's memory: how many pages it holds, and of what price."""

from dataclasses import dataclass

import psutil

from caching.host_tier import HostTier
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.config import EngineConfig
from engine.errors import ConfigurationError

STEPS_STAGED = 2
"""Steps whose tokens' pages may be on their way at once, each way: copies then keep up with what
steps compute while a list of them waits for the end of a step."""

COPY_SIZES = (4, 16)
"""Pages of one call that gathers or scatters; what is left of a list is padded with the sink."""


@dataclass(frozen=True)
class HostBudget:
    """Pages in the host's memory, and on their way to it or from it."""

    num_slots: int
    """Pages that the host holds."""
    staged: int
    """Pages on their way at once, each way."""
    bytes_per_page: int
    """Of the host's memory: of all its devices' parts."""

    def tier(self) -> HostTier:
        """An empty one."""
        return HostTier(self.num_slots, self.staged, self.bytes_per_page)

    @property
    def device_pages(self) -> int:
        """Pages that copies take of the device's memory: those on their way, and a call's twice."""
        return 2 * (self.staged + COPY_SIZES[-1])

    @property
    def num_bytes(self) -> int:
        """Of the host's memory, in all."""
        return self.num_slots * self.bytes_per_page


def host_budget(config: EngineConfig, page: PagedAttentionCacheMetaData, num_devices: int) -> HostBudget | None:
    """The tier of ``config``, where ``num_devices`` of all hosts have a ``page`` each; None without.

    Raises ConfigurationError if it holds not even one page, or the model has none.
    """
    if not config.host_cache_gib:
        return None
    if not page.bytes_per_page:
        raise ConfigurationError("host_cache_gib is for pages, and this model has none: leave it out")
    bytes_per_page = num_devices // config.num_processes * page.bytes_per_page
    slots = int(config.host_cache_gib * 2**30) // bytes_per_page
    if not slots:
        raise ConfigurationError(
            f"host_cache_gib {config.host_cache_gib:g} holds no page, which takes {bytes_per_page:,} bytes: raise it, or leave "
            f"it out"
        )
    tokens = STEPS_STAGED * config.max_num_batched_tokens
    return HostBudget(slots, len(page.windows) * pages_for(tokens, page.page_size), bytes_per_page)


def check_host_memory(budget: HostBudget, others: int) -> None:
    """Raises ConfigurationError if the host has less memory free than the tier and ``others``, in
    bytes, are to take."""
    available = psutil.virtual_memory().available
    if budget.num_bytes + others > available:
        beside = f" beside {others:,} bytes of weights and pages" if others else ""
        raise ConfigurationError(
            f"host_cache_gib asks for {budget.num_bytes:,} bytes of the host's memory, of which {available:,} are free{beside}: "
            "lower it"
        )
