"""What runs anywhere in the place of the attention kernels for TPUs."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from caching.attention.spec import CacheView
from caching.attention.xla_attention import XLAAttention

BLOCK_SIZES = {"num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"}


def plain_twin(q, kv_pages, *table, sm_scale, sliding_window, soft_cap, k_scale=None, v_scale=None, **block_sizes):
    """The twin of jax's kernel, with padding behind the queries as the kernel has it; concrete arrays only."""
    assert block_sizes.keys() == BLOCK_SIZES
    scores = {"sm_scale": sm_scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = ref_ragged_paged_attention(q, kv_pages, *table, **scores, k_scale=k_scale, v_scale=v_scale)
    return jnp.pad(out, ((0, q.shape[0] - out.shape[0]), (0, 0), (0, 0)))


@dataclass(frozen=True)
class PallasTwin:
    """XLA's attention, over a copy of our kernel's pages turned as it reads them; quick to compile."""

    fuses_rotation: ClassVar[bool] = False

    def __call__(self, spec, view, inputs):
        """See AttentionKernel."""
        num_pages, kv_heads, page_size, width = view.pages.shape
        halves = view.pages.reshape(num_pages, kv_heads, page_size, 2, width // 2).transpose(0, 1, 3, 2, 4)
        own = halves[..., : inputs.q.shape[-1]]
        own, out = XLAAttention(np.dtype(own.dtype))(spec, CacheView(own, view.table), inputs)
        halves = halves.at[..., : inputs.q.shape[-1]].set(own)
        return halves.transpose(0, 1, 3, 2, 4).reshape(view.pages.shape), out
