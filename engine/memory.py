"""How many pages the memory holds."""

import jax
import numpy as np
import psutil

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.config import ModelConfig

ACCELERATOR_UTILIZATION = 0.9
CPU_UTILIZATION = 0.4
"""A host's memory is shared with everything else that runs on it, an accelerator's is ours."""


def plan_cache(
    config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: np.dtype, weight_bytes: int
) -> PagedAttentionCacheMetaData:
    """The pool: what was asked for, or what the memory budget holds, but no more than every sequence at full length.

    Raises ConfigurationError when there is not one page for each sequence that may run.
    """
    needed = config.max_num_seqs * pages_for(max_model_len, config.page_size) + 1
    page = _metadata(config, model, 1, dtype).bytes_per_page
    budget = memory_budget(config) - weight_bytes - _scratch_bytes(config, model)
    fitting = max(0, budget // page)
    num_pages = min(needed, fitting) if config.num_pages is None else config.num_pages
    if num_pages > fitting:
        raise ConfigurationError(
            f"num_pages {num_pages} takes {num_pages * page:,} bytes, but only {max(0, budget):,} are left beside the "
            f"weights: lower num_pages, or raise hbm_utilization"
        )
    if num_pages < config.max_num_seqs + 1:
        raise ConfigurationError(
            f"{num_pages} pages of {page:,} bytes are too few for one page for each of max_num_seqs "
            f"{config.max_num_seqs} sequences and the sink: lower max_num_seqs, or give more memory "
            f"(hbm_utilization, num_pages)"
        )
    return _metadata(config, model, num_pages, dtype)


def memory_budget(config: EngineConfig) -> int:
    """Bytes of the first device that we may use, weights included."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        share = config.hbm_utilization or ACCELERATOR_UTILIZATION
        return int(stats["bytes_limit"] * share) - int(stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available * (config.hbm_utilization or CPU_UTILIZATION))


def _scratch_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """A generous guess at what the largest compiled step needs besides weights and pages, in float32."""
    per_slot = 4 * model.vocab_size + 2 * model.vocab_size  # the sampler's working set, and what it keeps of each slot
    per_token = 8 * model.hidden_size + 4 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    return 4 * (config.max_num_batched_tokens * per_token + config.max_num_seqs * per_slot)


def _metadata(config: EngineConfig, model: ModelConfig, num_pages: int, dtype: np.dtype) -> PagedAttentionCacheMetaData:
    return PagedAttentionCacheMetaData(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )
