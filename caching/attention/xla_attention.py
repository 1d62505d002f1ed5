"""Ragged paged attention by XLA's operations, for any device; see caching/attention/spec.py."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.running_softmax import MASKED, accumulate, padded_pages, settle, start, without_stale
from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from caching.page_dtype import as_read, as_stored

DECODE_BLOCK_TOKENS = 64
"""Keys per iteration over decoding rows; of 32 to 256 the fastest at 32 rows on a 2-core CPU."""

GPU_DECODE_BLOCK_TOKENS = 256
"""The same where the host has to look whether a loop goes on."""

PREFILL_BLOCK_TOKENS = 128
"""Keys per iteration of one prefill tile."""

PREFILL_TILE = 64
"""Queries of one sequence that are computed together."""


def write_pages(kv_pages: Array, k: Array, v: Array, pages: Array, offsets: Array, kv_dtype: np.dtype) -> Array:
    """Write k and v [T, kv_heads, head_dim] at i32[T] pages and offsets, in place if donated."""
    new = as_stored(jnp.stack([k, v], axis=2), kv_dtype)
    return kv_pages.at[pages, :, :, offsets, :].set(new, mode="promise_in_bounds")


@dataclass(frozen=True)
class XLAAttention:
    """Attention over ``kv_dtype`` pages [num_pages, kv_heads, 2, page_size, stored_head_dim]."""

    kv_dtype: np.dtype
    """The dtype of the numbers, see ``page_dtype``; the arrays have its ``stored_dtype``."""
    decode_block: int = DECODE_BLOCK_TOKENS
    """Keys per iteration over decoding rows."""
    fuses_rotation: ClassVar[bool] = False

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """See AttentionKernel."""
        pages = view.pages
        if inputs.k is not None and inputs.v is not None:
            places = view.table.locate(inputs.q.shape[0], pages.shape[3])
            pages = write_pages(pages, inputs.k, inputs.v, *places, self.kv_dtype)
        stored = _Pages(pages, self.kv_dtype, inputs.q.dtype)
        return pages, _attend(spec, stored, self.decode_block, view.table, inputs.q, inputs.sinks)


@dataclass(frozen=True)
class _Pages:
    """Pages, their dtype, and the dtype to compute with."""

    stored: Array
    dtype: np.dtype
    read_as: np.dtype

    @property
    def kv_heads(self) -> int:
        return self.stored.shape[1]

    @property
    def page_size(self) -> int:
        return self.stored.shape[3]

    def gather(self, pages: Array) -> tuple[Array, Array]:
        """Keys and values [rows, kv_heads, tokens, head_dim] of i32[rows, n] pages."""
        flat = self.stored.reshape(-1, *self.stored.shape[3:])
        heads = jnp.arange(self.kv_heads, dtype=jnp.int32)[None, :, None]
        key = (pages[:, None, :] * self.kv_heads + heads) * 2
        keys, values = (self._read(flat.at[index].get(mode="promise_in_bounds")) for index in (key, key + 1))
        return keys, values

    def _read(self, stored: Array) -> Array:
        """[rows, kv_heads, n, page_size, stored_head_dim]
        -> [rows, kv_heads, n * page_size, head_dim]."""
        rows, kv_heads, count, page_size, width = stored.shape
        return as_read(stored.reshape(rows, kv_heads, count * page_size, width), self.dtype, self.read_as)


def _scores(spec: AttentionSpec, q: Array, keys: Array) -> Array:
    """Scaled q[..., n, head_dim] by keys[..., c, head_dim] -> f32[..., n, c]."""
    scores = jnp.matmul(q, jnp.swapaxes(keys, -1, -2), preferred_element_type=jnp.float32)
    if spec.soft_cap is None:
        return scores
    return jnp.tanh(scores * np.float32(1 / spec.soft_cap)) * np.float32(spec.soft_cap)


def _attend(
    spec: AttentionSpec, pages: _Pages, decode_block: int, table: PageTable, q: Array, sinks: Array | None
) -> Array:
    """q[T, heads, head_dim] -> like q.

    The cost follows the rows' context: loops over blocks of keys end at the longest row. The
    softmax is a running one (Milakov and Gimelshein 2018).
    """
    q = (q.astype(jnp.float32) * np.float32(spec.scale)).astype(q.dtype)
    layer = _Layer(
        spec, pages, decode_block, None if sinks is None else sinks.astype(jnp.float32).reshape(pages.kv_heads, -1)
    )
    num_decodes = table.num_decodes
    decoded = layer.decode_rows(q[: table.kv_lens.shape[0]], table, num_decodes)
    if q.shape[0] == 1:
        return decoded
    return layer.prefill_rows(q, decoded, table, num_decodes)


@dataclass(frozen=True)
class _Layer:
    """The attention of one layer: its spec, pages and sinks."""

    spec: AttentionSpec
    pages: _Pages
    decode_block: int
    sinks: Array | None
    """f32[kv_heads, group]"""

    def decode_rows(self, q: Array, table: PageTable, num_decodes: Array) -> Array:
        """Attention of the leading rows of one query each; q[rows, heads, head_dim] -> like q."""
        rows, heads, head_dim = q.shape
        kv_heads, page_size = self.pages.kv_heads, self.pages.page_size
        block_pages = max(1, self.decode_block // page_size)
        block = block_pages * page_size
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        lens = jnp.where(jnp.arange(rows, dtype=jnp.int32) < num_decodes, table.kv_lens, 0)
        firsts = self.spec.first_seen(jnp.maximum(lens - 1, 0))
        pages = padded_pages(table.page_indices, block_pages)

        def attend(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            here = jax.lax.dynamic_slice(pages, (jnp.int32(0), index * block_pages), (rows, block_pages))
            keys, values = self.pages.gather(here)
            position = index * block + jnp.arange(block, dtype=jnp.int32)[None, :]
            seen = (position < lens[:, None]) & (position >= firsts[:, None])
            scores = _scores(self.spec, grouped, keys)
            values = without_stale(values, firsts, lens, position)
            return accumulate(state, jnp.where(seen[:, None, None, :], scores, MASKED), values)

        begin = jnp.min(jnp.where(lens > 0, firsts, np.int32(2**30))) // block
        end = (jnp.max(lens) + (block - 1)) // block
        state = jax.lax.fori_loop(begin, end, attend, start(grouped.shape[:-1], head_dim, self.sinks))
        return settle(state).astype(q.dtype).reshape(rows, heads, head_dim)

    def prefill_rows(self, q: Array, decoded: Array, table: PageTable, num_decodes: Array) -> Array:
        """Attention of the rows after the decoding ones, a tile at a time.

        q[T, heads, head_dim] and ``decoded`` [rows, heads, head_dim] -> like q. Tiles run in token
        order. A tile that reaches past its row writes to the next row's tokens, which that row's
        first tile overwrites, or to the padding at the end.
        """
        tokens, heads, head_dim = q.shape
        tile = min(tokens, PREFILL_TILE)
        rows = table.kv_lens.shape[0]
        padding = ((0, tile), (0, 0), (0, 0))
        q = jnp.pad(q, padding)
        out = jnp.pad(decoded, ((0, tokens - rows + tile), (0, 0), (0, 0)))

        def row_tiles(row: Array, out: Array) -> Array:
            first, past = table.cu_q_lens[row], table.cu_q_lens[row + 1]
            context = table.kv_lens[row] - (past - first)

            def one(index: Array, out: Array) -> Array:
                start = first + index * tile
                queries = jax.lax.dynamic_slice(q, (start, jnp.int32(0), jnp.int32(0)), (tile, heads, head_dim))
                pages = jax.lax.dynamic_slice(table.page_indices, (row, jnp.int32(0)), (1, table.page_indices.shape[1]))
                done = self._tile(queries, pages, context + index * tile, table.kv_lens[row])
                return jax.lax.dynamic_update_slice(out, done, (start, jnp.int32(0), jnp.int32(0)))

            walked: Array = jax.lax.fori_loop(jnp.int32(0), (past - first + (tile - 1)) // tile, one, out)
            return walked

        walked: Array = jax.lax.fori_loop(num_decodes, table.num_seqs[0], row_tiles, out)
        return walked[:tokens]

    def _tile(self, q: Array, pages: Array, position: Array, kv_len: Array) -> Array:
        """q[tile, heads, head_dim] from ``position`` on, in a row of ``kv_len`` tokens -> as q."""
        tile, heads, head_dim = q.shape
        kv_heads, page_size = self.pages.kv_heads, self.pages.page_size
        group = heads // kv_heads
        block_pages = max(1, PREFILL_BLOCK_TOKENS // page_size)
        block = block_pages * page_size
        pages = padded_pages(pages, block_pages)
        grouped = (
            q.reshape(tile, kv_heads, group, head_dim).transpose(1, 2, 0, 3).reshape(kv_heads, group * tile, head_dim)
        )
        query_position = position + jnp.arange(tile, dtype=jnp.int32)[:, None]

        def attend(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            here = jax.lax.dynamic_slice(pages, (jnp.int32(0), index * block_pages), (1, block_pages))
            keys, values = (gathered[0] for gathered in self.pages.gather(here))
            key_position = index * block + jnp.arange(block, dtype=jnp.int32)[None, :]
            seen = (key_position <= query_position) & (key_position < kv_len)
            if not self.spec.sees_all:
                seen &= key_position >= self.spec.first_seen(query_position)
            scores = _scores(self.spec, grouped, keys)
            masked = jnp.where(seen, scores.reshape(kv_heads, group, tile, block), MASKED)
            values = without_stale(values, seen_from, kv_len, key_position[0])
            return accumulate(state, masked.reshape(kv_heads, group * tile, block), values)

        seen_from = self.spec.first_seen(position)
        begin, end = seen_from // block, (jnp.minimum(position + tile, kv_len) + (block - 1)) // block
        sinks = None if self.sinks is None else jnp.repeat(self.sinks, tile, axis=1)
        state = jax.lax.fori_loop(begin, end, attend, start((kv_heads, group * tile), head_dim, sinks))
        out = settle(state).astype(q.dtype).reshape(kv_heads, group, tile, head_dim)
        return out.transpose(2, 0, 1, 3).reshape(tile, heads, head_dim)
