"""The counters and gauges of an engine."""

import msgspec

FIRST_VERSION = 1
"""Of the weights of the start."""


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the engine. The execution thread publishes it; any thread may read it."""

    running: int = 0
    """Sequences that have a slot."""
    max_num_seqs: int = 0
    """Slots."""
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_owned: int = 0
    host_pages_total: int = 0
    """Pages that the host's memory holds; 0 without a tier there."""
    host_pages_cached: int = 0
    """Pages of prefixes in it."""
    host_states_total: int = 0
    """Recurrent states that it holds beside them."""
    host_states_cached: int = 0
    """Those that end a prefix."""
    host_bytes_stored: int = 0
    """Bytes copied to it."""
    host_bytes_loaded: int = 0
    """Bytes copied back."""
    host_seconds_stored: float = 0.0
    """Of the copies to it, each list of them until it was seen to have arrived."""
    host_seconds_loaded: float = 0.0
    """The same of the copies back."""
    host_pages_lost: int = 0
    """Pages evicted from the device without a copy, as too many were on their way."""
    host_states_lost: int = 0
    """The same of recurrent states."""
    host_page_bytes: int = 0
    """Bytes of the host's memory that a page takes."""
    host_state_bytes: int = 0
    """Bytes that a recurrent state takes there."""
    host_cache_queries: int = 0
    """Tokens of admitted sequences that the device's pages did not have."""
    host_cache_hits: int = 0
    """Those of them that came from the host's memory."""
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_drafts: int = 0
    """Rows that verified drafts (vLLM's names, to the last of these four)."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Drafts that were the next tokens."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """The same by the draft's position in its row; as many as a row may have, () without drafts."""
    num_earlier_draft_tokens: int = 0
    """Drafts of earlier sequences' texts that were verified, but for those of rows with a grammar."""
    num_earlier_accepted_tokens: int = 0
    """Those of them that were the next tokens."""
    earlier_tokens: int = 0
    """Tokens of earlier sequences that are kept to draft from."""
    earlier_salts: int = 0
    """Salts that have such: tenants, each with its cache salts and adapters."""
    preemptions: int = 0
    preemptions_by_cause: dict[str, int] = {}
    """See engine/scheduling/preemption.py."""
    waiting_tokens: int = 0
    """Known tokens of waiting sequences."""
    prefix_cache_queries: int = 0
    """Tokens of admitted sequences that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens that were prefix hits and were not computed."""
    page_evictions: int = 0
    """Cached pages that were evicted."""
    recurrent_states_total: int = 0
    """Slots for recurrent states; 0 in a model without such."""
    recurrent_states_cached: int = 0
    """States that no sequence uses and that a prefix hit may begin from."""
    recurrent_state_evictions: int = 0
    """Cached states that were evicted."""
    page_lifetime_seconds_sum: float = 0.0
    """Of evicted pages, from when they were filled."""
    page_idle_seconds_sum: float = 0.0
    """Of evicted pages, since their last owner released them."""
    failed_steps: int = 0
    """Steps that failed on the device. Their requests failed too; others were recomputed."""
    failed_rows: int = 0
    """Requests that ended with an error because their logits held NaN or infinity."""
    step_gap_seconds_sum: float = 0.0
    """Device idle time between steps while there was work; see engine/step/timing/step_gap.py."""
    step_gap_seconds_count: int = 0
    """Steps that followed another without an idle period."""
    step_seconds: dict[str, float] = {}
    """Of all steps, by phase; see engine/step/timing/step_times.py."""
    compilations_after_ready: int = 0
    """Unplanned compilations. Those of staged readiness are counted below."""
    staged_compilations: int = 0
    """Functions compiled while serving and now in use."""
    staged_compilations_left: int = 0
    """Functions still to compile. Until then some steps run in a larger bucket than they need."""
    replaced_kernels: int = 0
    """Kernels that are at fault on this machine; XLA's operations serve in their place."""
    asleep: bool = False
    """Whether the pages' memory is freed, or the weights'."""
    weight_version: int = FIRST_VERSION
    """Of the weights that are served: each update is one more."""
    weight_name: str = ""
    """The operator's name of that version."""
    has_pages: bool = True
    """Whether the devices have any: not in a sleep."""
    has_weights: bool = True
    """Whether the devices have any: not in a sleep of level 2."""
    awaits_weights: bool = False
    """Whether they have none, and those that were served came as arrays, which cannot be read
    again: an update has to bring all."""
    max_loras: int = 0
    """Slots for adapters on the device; 0 if none are served."""
    adapter_loads: int = 0
    """Adapters that were written to a slot."""
    adapter_evictions: int = 0
    """Those of them that took another adapter's slot."""
    adapters_running: dict[int, int] = {}
    """By an adapter's uid, the sequences that run with it, if any."""
    adapters_waiting: dict[int, int] = {}
    """By an adapter's uid, the sequences that wait with it, if any."""

    @property
    def tokens(self) -> int:
        """Prompt tokens computed plus tokens generated."""
        return self.prompt_tokens + self.generated_tokens
