"""What runs anywhere in the place of the attention kernels for TPUs, with their signatures."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from caching.attention import xla_attention as attention

BLOCK_SIZES = {"num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"}


def plain_twin(q, kv_pages, *table, sm_scale, sliding_window, k_scale=None, v_scale=None, **block_sizes):
    """The kernel's own, with padding behind the queries as the kernel has it; concrete arrays only."""
    assert block_sizes.keys() == BLOCK_SIZES
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = ref_ragged_paged_attention(
            q, kv_pages, *table, sm_scale=sm_scale, sliding_window=sliding_window, k_scale=k_scale, v_scale=v_scale
        )
    return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)))


def pallas_twin(kv_pages, q, k, v, table, *, sm_scale, sliding_window):
    """Our attention by XLA, over a copy of our kernel's pages turned as it reads them; quick to compile."""
    pages, kv_heads, page_size, width = kv_pages.shape
    halves = kv_pages.reshape(pages, kv_heads, page_size, 2, width // 2).transpose(0, 1, 3, 2, 4)
    own = halves[..., : q.shape[-1]]
    own, out = attention.paged_attention(
        own, q, k, v, table, sm_scale=sm_scale, sliding_window=sliding_window, kv_dtype=np.dtype(own.dtype)
    )
    halves = halves.at[..., : q.shape[-1]].set(own)
    return halves.transpose(0, 1, 3, 2, 4).reshape(kv_pages.shape), out
