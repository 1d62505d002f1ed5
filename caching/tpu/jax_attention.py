"""Ragged paged attention on a TPU, by the Pallas kernel that jax ships.

A layer's pages are ``[num_pages, page_size, 2 * kv_heads, head_dim]``, a head's key and value side
by side. Heads are padded with zeros to sizes that the kernel can tile (``stored_heads``): in the
pages, and in q, k and v before the call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import is_scaled, rounded
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu.tpu_chip import LANES, SUBLANES, VMEM_LIMIT_BYTES, Chip

LATENCY = 1.3e-6
"""Seconds to fetch one block of keys and values: several times a transfer's latency."""

MAX_BLOCK_PAGES = 16
"""Transfers of one block; each has its address in one of 32 scalar registers."""

QUERY_BLOCK = 32
"""Queries computed together; jax's own tables mostly have 32, at most 64."""

TABLE_BYTES = 2**20 - 2**16
"""Of a chip's 1 MiB of scalar memory; lengths and the kernel itself have the rest."""
MOST_PAGES_PER_SEQ = TABLE_BYTES // 4
"""Rows are computed in blocks, so that only one row's table has to fit."""

Kernel = Callable[..., Array]
"""jax's ``ragged_paged_attention``, or a function of the same signature."""


def stored_heads(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    """The kv_heads and head_dim of pages that the kernel can read.

    A row is whole registers. Keys and values of all heads, packed into words of 32 bits, are 1,
    2, 4 or a multiple of SUBLANES words.
    """
    packed = max(1, 4 // dtype.itemsize)
    words = -(-2 * kv_heads // packed)
    words = 1 << (words - 1).bit_length() if words <= SUBLANES else -(-words // SUBLANES) * SUBLANES
    return max(1, words * packed // 2), -(-head_dim // LANES) * LANES


def rows_at_once(pages_per_seq: int) -> int:
    """Rows, of at most MOST_PAGES_PER_SEQ, whose page table fits in scalar memory."""
    return TABLE_BYTES // (4 * -(-pages_per_seq // LANES) * LANES)


def allocate(metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
    """Zeroed pages on the default device. Raises jax.errors.JaxRuntimeError if they do not fit."""
    page = (metadata.page_size, 2 * metadata.num_kv_heads, metadata.head_dim)
    return PagedAttentionCache(tuple(jnp.zeros((pages, *page), metadata.dtype) for pages in metadata.array_pages))


def write_pages(kv_pages: Array, k: Array, v: Array, pages: Array, offsets: Array) -> Array:
    """Write k and v [T, kv_heads, head_dim] at i32[T] pages and offsets, in place if donated."""
    page_size, *token = kv_pages.shape[1:]
    new = rounded(jnp.stack([k, v], axis=2).reshape(k.shape[0], *token), kv_pages.dtype)
    flat = kv_pages.reshape(-1, *token)
    return flat.at[pages * page_size + offsets].set(new, mode="promise_in_bounds").reshape(kv_pages.shape)


@dataclass(frozen=True)
class TPUAttention:
    """Attention over pages on one kind of chip."""

    chip: Chip
    kernel: Kernel = kernel.ragged_paged_attention
    fuses_rotation: ClassVar[bool] = False

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """See AttentionKernel. Raises ValueError for sinks and shared keys, which it has not."""
        if inputs.sinks is not None:
            raise ValueError("jax's TPU kernel has no attention sinks: choose attention_backend pallas or xla")
        if inputs.k is None or inputs.v is None:
            raise ValueError("jax's TPU kernel reads no other layer's pages: choose attention_backend pallas or xla")
        kv_pages, table, q, k, v = view.pages, view.table, inputs.q, inputs.k, inputs.v
        _, page_size, combined, head_dim = kv_pages.shape
        heads, (tokens, kv_heads, narrow) = q.shape[1], k.shape
        grouped = _padded(q.reshape(tokens, kv_heads, heads // kv_heads, narrow), combined // 2, head_dim)
        k, v = _padded(k, combined // 2, head_dim), _padded(v, combined // 2, head_dim)
        kv_pages = write_pages(kv_pages, k, v, *table.locate(tokens, page_size))
        if spec.window is not None:
            table = _from_window(table, spec.window, page_size)
        # Pages of another dtype than q's are converted at these scales.
        as_queries = {} if kv_pages.dtype == q.dtype else {"k_scale": 1.0, "v_scale": 1.0}

        def attend(queries: Array, rows: PageTable) -> Array:
            return self.kernel(
                queries,
                kv_pages,
                rows.kv_lens,
                rows.page_indices,
                rows.cu_q_lens,
                rows.num_seqs,
                sm_scale=spec.scale,
                sliding_window=spec.window,
                soft_cap=spec.soft_cap,
                num_kv_pages_per_block=block_pages(self.chip, kv_pages, table.page_indices.shape[1]),
                num_queries_per_block=min(tokens, QUERY_BLOCK),
                vmem_limit_bytes=VMEM_LIMIT_BYTES,
                **as_queries,
            )

        out = _in_blocks_of_rows(attend, grouped.reshape(tokens, -1, head_dim), table)
        return kv_pages, out.reshape(grouped.shape)[:, :kv_heads, :, :narrow].reshape(q.shape)


def _in_blocks_of_rows(attend: Callable[[Array, PageTable], Array], q: Array, table: PageTable) -> Array:
    """q[T, heads, head_dim] -> like q, by as many rows at once as scalar memory holds.

    Blocks run in the order of their tokens: what one gives behind its own is overwritten.
    """
    (rows, pages_per_seq), tokens = table.page_indices.shape, q.shape[0]
    most = rows_at_once(pages_per_seq)
    if rows <= most:
        return attend(q, table)
    missing = (0, -rows % most)
    lens, page_indices = jnp.pad(table.kv_lens, missing), jnp.pad(table.page_indices, (missing, (0, 0)))
    begins, q = jnp.pad(table.cu_q_lens, missing, mode="edge"), jnp.pad(q, ((0, tokens), (0, 0), (0, 0)))

    def one_block(index: Array, out: Array) -> Array:
        first = index * most
        of_block = jax.lax.dynamic_slice_in_dim(begins, first, most + 1)
        queries = jax.lax.dynamic_slice_in_dim(q, of_block[0], tokens)
        block = PageTable(
            jax.lax.dynamic_slice_in_dim(lens, first, most),
            jax.lax.dynamic_slice_in_dim(page_indices, first, most),
            of_block - of_block[0],
            jnp.minimum(table.num_seqs - first, most),
        )
        return jax.lax.dynamic_update_slice_in_dim(out, attend(queries, block), of_block[0], 0)

    blocks = (table.num_seqs[0] + (most - 1)) // most
    out: Array = jax.lax.fori_loop(jnp.int32(0), blocks, one_block, jnp.zeros_like(q))
    return out[:tokens]


def _from_window(table: PageTable, window: int, page_size: int) -> PageTable:
    """The table without the pages before each row's window: the kernel reads all that there are."""
    firsts = jnp.maximum(table.kv_lens - table.q_lens - (window - 1), 0) // page_size
    last = table.page_indices.shape[1] - 1
    places = jnp.minimum(firsts[:, None] + jnp.arange(last + 1, dtype=jnp.int32)[None, :], last)
    page_indices = jnp.take_along_axis(table.page_indices, places, axis=1, mode="promise_in_bounds")
    return replace(table, kv_lens=table.kv_lens - firsts * page_size, page_indices=page_indices)


def block_pages(chip: Chip, kv_pages: Array | jax.ShapeDtypeStruct, pages_per_seq: int) -> int:
    """Pages per block: the fewest that saturate HBM, as short rows cost a whole block too."""
    bytes_per_page = math.prod(kv_pages.shape[1:]) * kv_pages.dtype.itemsize
    enough = -(-int(chip.hbm_bandwidth * LATENCY) // bytes_per_page)
    return min(enough, MAX_BLOCK_PAGES, pages_per_seq)


def tokens_read(chip: Chip, page: PagedAttentionCacheMetaData, pages_per_seq: int, tokens: int) -> int:
    """Tokens whose keys and values the kernel reads for a row of ``tokens``: whole blocks."""
    pool = jax.ShapeDtypeStruct((1, page.page_size, 2 * page.num_kv_heads, page.head_dim), page.dtype)
    block = block_pages(chip, pool, pages_per_seq) * page.page_size
    return -(-tokens // block) * block


def tokens_written(page: PagedAttentionCacheMetaData) -> float:
    """Tokens moved per token written: XLA joins key and value, reads them and scatters them."""
    del page
    return 3


def misfit(page_size: int, dtype: np.dtype, extras: str | None) -> str | None:
    """Why the kernel cannot serve, and what to choose instead: it has one scale for all pages, and no extras."""
    del page_size
    if extras:
        return f"it has no {extras}: choose auto or xla"
    if is_scaled(dtype):
        return f"kv_cache_dtype {dtype} has a scale for each token: choose fp8, or attention_backend xla"
    return None


def _padded(x: Array, kv_heads: int, head_dim: int) -> Array:
    """x[T, kv_heads, ..., head_dim] with zeros appended to both axes."""
    between = ((0, 0),) * (x.ndim - 3)
    return jnp.pad(x, ((0, 0), (0, kv_heads - x.shape[1]), *between, (0, head_dim - x.shape[-1])))
