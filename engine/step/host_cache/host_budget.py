"""The tier of the prefix cache in the host's memory: how many pages it holds, and of what price."""

from dataclasses import dataclass

from caching.host_tier import HostTier
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.memory.host_memory import available_bytes

STEPS_STAGED = 4
"""Steps whose tokens' pages may be on their way at once, each way: several sequences that are
admitted in one plan evict many pages at once, and what finds no room on the way is lost."""

COPY_SIZES = (4, 16)
"""Pages of one call that gathers or scatters; what is left of a list is padded with the sink."""
STATE_COPY_SIZES = (1,)
"""The same of recurrent states, of which one has the bytes of many pages."""
STATES_STAGED = 4
"""States that may be on their way at once, each way: prompts that end, and turns that begin, in a
step or two."""


@dataclass(frozen=True)
class HostBudget:
    """Pages, or recurrent states, in the host's memory, and on their way to it or from it."""

    num_slots: int
    """Pages that the host holds."""
    staged: int
    """Pages on their way at once, each way."""
    bytes_per_slot: int
    """Of the host's memory: of all its devices' parts."""
    copy_sizes: tuple[int, ...] = COPY_SIZES
    """Pages of one call that gathers or scatters."""
    states: "HostBudget | None" = None
    """Beside that of pages the one of states, in a model that has such."""

    def tier(self) -> HostTier:
        """An empty one, without that of states."""
        return HostTier(self.num_slots, self.staged, self.bytes_per_slot)

    @property
    def device_pages(self) -> int:
        """Pages that copies take of the device's memory: those on their way, and a call's twice."""
        return 2 * (self.staged + self.copy_sizes[-1])

    @property
    def num_bytes(self) -> int:
        """Of the host's memory, in all."""
        return self.num_slots * self.bytes_per_slot + (0 if self.states is None else self.states.num_bytes)


def host_budget(
    config: EngineConfig, page: PagedAttentionCacheMetaData, num_devices: int, pages_each: int
) -> HostBudget | None:
    """The tier of ``config``, where ``num_devices`` of all hosts have a ``page`` each; None without.

    To ``pages_each`` pages it holds a recurrent state, in a model that has such. Raises
    ConfigurationError if it holds not even one page, or the model has none.
    """
    if not config.host_cache_gib:
        return None
    if not page.bytes_per_page:
        raise ConfigurationError("host_cache_gib is for pages, and this model has none: leave it out")
    devices, num_bytes = num_devices // config.num_processes, int(config.host_cache_gib * 2**30)
    bytes_per_page, states = devices * page.bytes_per_page, None
    if page.states is not None:
        bytes_per_state = devices * page.bytes_per_slot
        count = max(1, num_bytes // (pages_each * bytes_per_page + bytes_per_state))
        states = HostBudget(count, STATES_STAGED, bytes_per_state, STATE_COPY_SIZES)
        num_bytes -= states.num_bytes
    slots = max(0, num_bytes) // bytes_per_page
    if not slots:
        raise ConfigurationError(
            f"host_cache_gib {config.host_cache_gib:g} holds no page, which takes {bytes_per_page:,} bytes"
            f"{'' if states is None else f' beside the {states.num_bytes:,} of a state'}: raise it, or leave it out"
        )
    tokens = STEPS_STAGED * config.max_num_batched_tokens
    staged = len(page.windows) * pages_for(tokens, page.page_size)
    return HostBudget(slots, staged, bytes_per_page, states=states)


def check_host_memory(budget: HostBudget, others: int) -> None:
    """Raises ConfigurationError if the host has less memory free than the tier and ``others``, in
    bytes, are to take."""
    available = available_bytes()
    if budget.num_bytes + others > available:
        beside = f" beside {others:,} bytes of weights and pages" if others else ""
        raise ConfigurationError(
            f"host_cache_gib asks for {budget.num_bytes:,} bytes of the host's memory, of which {available:,} are free{beside}: "
            "lower it"
        )
