"""What runs anywhere in the place of jax's attention kernel for TPUs, with its signature."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from caching import attention
from caching.attention import PageTable

BLOCK_SIZES = {"num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"}


def plain_twin(q, kv_pages, *table, sm_scale, sliding_window, k_scale=None, v_scale=None, **block_sizes):
    """The kernel's own, with padding behind the queries as the kernel has it; concrete arrays only."""
    assert block_sizes.keys() == BLOCK_SIZES
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = ref_ragged_paged_attention(
            q, kv_pages, *table, sm_scale=sm_scale, sliding_window=sliding_window, k_scale=k_scale, v_scale=v_scale
        )
    return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)))


def xla_twin(q, kv_pages, *table, sm_scale, sliding_window, k_scale=None, v_scale=None, **block_sizes):
    """Our attention by XLA, over a copy of the pages turned as it reads them; can be compiled. Its scales are 1."""
    assert {k_scale, v_scale} <= {None, 1.0}
    assert block_sizes.keys() == BLOCK_SIZES
    pages, page_size, combined, head_dim = kv_pages.shape
    turned = kv_pages.reshape(pages, page_size, combined // 2, 2, head_dim).transpose(0, 2, 3, 1, 4)
    return attention.ragged_paged_attention(
        q, turned, PageTable(*table), sm_scale=sm_scale, sliding_window=sliding_window
    )
