"""Ragged paged attention on a CPU by a kernel of our own, which reads the pages where they lie.

A page holds one head's keys as [head_dim, page_size] and its values as [page_size, head_dim], both in the place that
``PagedAttentionCache`` has for [page_size, head_dim].
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax import Array

from caching.attention.xla_attention import PageTable
from caching.cpu_kernels import load, register
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache

SOURCE = Path(__file__).parent.parent / "cpu" / "attention.cc"
DTYPES = ("float32", "bfloat16")
"""Of pages that it can read."""


@cache
def vector_width() -> int:
    """What page_size and head_dim must be multiples of; makes the kernel known to XLA. Raises KernelsUnavailable."""
    library = load(SOURCE)
    for name in ("odriver_attention", "odriver_untouched"):
        register(library, name)
    return int(library.odriver_vector_width())


def allocate(metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
    """Pages that take memory as they are first used: to touch all of them takes a second for each GB."""
    untouched = _untouched(PagedAttentionCache.layer_struct(metadata))
    return PagedAttentionCache(tuple(untouched() for _ in range(metadata.num_layers)))


@cache
def _untouched(layer: jax.ShapeDtypeStruct) -> Callable[[], Array]:
    """Compiled once, so that pages can be allocated again while serving."""
    return jax.jit(jax.ffi.ffi_call("odriver_untouched", layer))


def paged_attention(
    kv_pages: Array,
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    table: PageTable,
    *,
    sm_scale: float,
    sliding_window: int | None,
) -> tuple[Array, Array]:
    """Turn q[T, heads, head_dim] and k by cos and sin f32[T, 1, head_dim / 2], write k and v [T, kv_heads, head_dim]
    into their pages, attend.

    Returns the pages, in place, and f32 like q; 0 for padding. A query's result does not depend, in any bit, on the
    other rows nor on how its prompt was cut into chunks.
    """
    call = jax.ffi.ffi_call(
        "odriver_attention",
        (jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype), jax.ShapeDtypeStruct(q.shape, np.float32)),
        input_output_aliases={0: 0},
    )
    pages, out = call(
        kv_pages,
        *(x.astype(np.float32) for x in (q, k, v, cos, sin)),
        table.kv_lens,
        table.page_indices,
        table.cu_q_lens,
        table.num_seqs,
        sm_scale=np.float32(sm_scale),
        sliding_window=np.int64(sliding_window or 0),
    )
    return pages, out
