"""Latent attention over pages by XLA's operations, for any device; see LatentSpec.

For each head, query and key, latents of rank r and a rotated key of p numbers can be scored in one
of two ways. *Absorbed*: the query goes through the head's projection of keys, and meets the
latents themselves: 2 r + p products, and r (n + v) for each query. *Expanded*: the head's keys of
n + p numbers and values of v are made of the latents again: n + p + v products, and r (n + v) for
each key. Each row of a step is computed in the way of fewer products. With DeepSeek's r 512, p 64,
n 128 and v 128, that is 1,088 or 320 and 131,072: prompts are expanded if they are new, or if
their chunk has more than 171 tokens; decoding rows are absorbed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.latent_projections import product
from caching.attention.running_softmax import MASKED, accumulate, padded_pages, settle, start
from caching.attention.spec import CacheView, LatentInputs, LatentSpec, PageTable
from caching.page_dtype import STORED_AS

DECODE_BLOCK_TOKENS = 64
"""Keys per iteration over decoding rows."""
BLOCK_TOKENS = 128
"""Keys per iteration of a prefill tile."""
TILE = 64
"""Queries of one sequence that are computed together."""

BITS = STORED_AS["bfloat16"]

State = tuple[Array, Array, Array]
"""Of a running softmax, by head and token."""


@dataclass(frozen=True)
class XLALatentAttention:
    """Attention over pages of latents in a float dtype of 16 or 32 bits; a LatentKernel."""

    widens: bool = False
    """Whether all is computed in float32: XLA:CPU has no batches of products in bfloat16."""
    keys_a_turn: int = 0
    """Keys of all decoding rows together in a turn of their loop, where it has time for more than
    DECODE_BLOCK_TOKENS of each."""
    fuses_rotation: ClassVar[bool] = False

    def __call__(self, spec: LatentSpec, view: CacheView, inputs: LatentInputs) -> tuple[Array, Array]:
        """See LatentKernel."""
        dtype, (page_size, width) = inputs.q.dtype, view.pages.shape[3:]
        if self.widens:
            inputs = jax.tree.map(_widened, inputs)
        tokens = inputs.q.shape[0]
        missing = width - inputs.latents.shape[1]
        new = _stored(jnp.pad(inputs.latents, ((0, 0), (0, missing))), view.pages.dtype)
        at_pages, offsets = view.table.locate(tokens, page_size)
        pages = view.pages.at[at_pages, 0, 0, offsets, :].set(new, mode="promise_in_bounds")
        heads = _Heads(spec, pages, view.table, inputs)
        num_decodes = view.table.num_decodes
        decoded = heads.decode_rows(num_decodes, self.keys_a_turn)
        attended = decoded if tokens == 1 else heads.prefill_rows(decoded, num_decodes)
        return pages, attended.astype(dtype)


@dataclass(frozen=True)
class _Heads:
    """The heads of one layer on one device."""

    spec: LatentSpec
    pages: Array
    table: PageTable
    inputs: LatentInputs

    @property
    def width(self) -> int:
        """Numbers of a latent and its rotated key."""
        return self.inputs.latents.shape[1]

    def gather(self, pages: Array) -> Array:
        """Latents f[rows, n * page_size, rank + rope] of i32[rows, n] pages."""
        page_size, stored = self.pages.shape[3:]
        flat = self.pages.reshape(-1, page_size, stored)
        found = flat.at[pages].get(mode="promise_in_bounds")
        return _numbers(found.reshape(pages.shape[0], -1, stored)[..., : self.width]).astype(self.inputs.q.dtype)

    def is_seen(self, keys: Array, queries: Array) -> Array:
        """bool[...] whether i32[...] positions of keys are seen by queries at these."""
        seen = keys <= queries
        return seen & (keys >= jnp.minimum(queries, self.spec.first)) if self.spec.first else seen

    def absorbed(self, q: Array, q_rotated: Array, tokens: Array) -> Array:
        """Queries [n, heads, ...] that score latents, f[n, heads, rank + rope], scaled.

        i32[n] ``tokens`` are as in LatentProjections.
        """
        projected = self.inputs.projections.of_queries(q, tokens)
        wide = jnp.concatenate([projected, q_rotated.astype(jnp.float32)], axis=-1)
        return (wide * np.float32(self.spec.scale)).astype(q.dtype)

    def values_of(self, latents: Array, tokens: Array) -> Array:
        """Means of latents f32[n, heads, rank] -> f32[n, heads, v]."""
        return self.inputs.projections.of_means(latents.astype(self.inputs.q.dtype), tokens)

    def decode_rows(self, num_decodes: Array, keys_a_turn: int) -> Array:
        """f[rows, heads, v] of the leading rows of one query each."""
        table, (page_size, rank) = self.table, (self.pages.shape[3], self.spec.rank)
        rows = table.kv_lens.shape[0]
        block_pages = max(1, max(DECODE_BLOCK_TOKENS, keys_a_turn // rows) // page_size)
        block = block_pages * page_size
        tokens = jnp.arange(rows, dtype=jnp.int32)
        q = self.absorbed(self.inputs.q[:rows], self.inputs.q_rotated[:rows], tokens)
        lens = jnp.where(tokens < num_decodes, table.kv_lens, 0)
        pages = padded_pages(table.page_indices, block_pages)

        def attend(index: Array, state: State) -> State:
            here = jax.lax.dynamic_slice(pages, (jnp.int32(0), index * block_pages), (rows, block_pages))
            keys = index * block + jnp.arange(block, dtype=jnp.int32)
            is_seen = self.is_seen(keys[None, :], lens[:, None] - 1)
            latents = _known(self.gather(here), is_seen)
            scores = product("thw,tbw->thb", q, latents)
            return accumulate(state, jnp.where(is_seen[:, None, :], scores, MASKED), latents[..., :rank])

        end = (jnp.max(lens) + (block - 1)) // block
        state = jax.lax.fori_loop(jnp.int32(0), end, attend, start(q.shape[:2], rank))
        return self.values_of(settle(state), tokens).astype(q.dtype)

    def prefill_rows(self, decoded: Array, num_decodes: Array) -> Array:
        """f[T, heads, v] of all rows, of which ``decoded`` are the leading ones.

        Rows run in token order, tiles of queries within them. A tile that reaches past its row
        changes the next row's state, which that begins anew, or the padding at the end.
        """
        tokens, heads, _ = self.inputs.q.shape
        tile, rows = min(tokens, TILE), decoded.shape[0]
        prompts = _Prompts(
            self, tile, jax.tree.map(lambda x: _by_head(x, tile), (self.inputs.q, self.inputs.q_rotated))
        )
        high, total, weighted = start((heads, tokens + tile), decoded.shape[-1])
        state = high, total.at[:, :rows].set(1.0), weighted.at[:, :rows].set(decoded.astype(jnp.float32).swapaxes(0, 1))
        state = jax.lax.fori_loop(num_decodes, self.table.num_seqs[0], prompts.row, state)
        return settle(state)[:, :tokens].swapaxes(0, 1).astype(decoded.dtype)


@dataclass(frozen=True)
class _Prompts:
    """The rows of several new tokens."""

    heads: _Heads
    tile: int
    queries: tuple[Array, Array]
    """f[heads, T + tile, nope] and f[heads, T + tile, rope]"""

    def row(self, row: Array, state: State) -> State:
        """The state with that of a row's tokens."""
        table = self.heads.table
        first, past = table.cu_q_lens[row], table.cu_q_lens[row + 1]
        here = _Row(first, past - first, table.kv_lens[row], self._pages_of(row))
        tiles = (here.count + (self.tile - 1)) // self.tile
        expands = self._is_cheaper_expanded(here)
        absorbed = jnp.where(expands, 0, tiles)
        state = jax.lax.fori_loop(jnp.int32(0), absorbed, lambda index, state: self._absorb(here, index, state), state)
        blocks = jnp.where(expands, (here.kv_len + (self._block - 1)) // self._block, 0)

        def attend(index: Array, state: State) -> State:
            return self._expand(here, index, tiles, state)

        walked: State = jax.lax.fori_loop(jnp.int32(0), blocks, attend, state)
        return walked

    @property
    def _block_pages(self) -> int:
        return max(1, BLOCK_TOKENS // self.heads.pages.shape[3])

    @property
    def _block(self) -> int:
        """Tokens of a block of keys."""
        return self._block_pages * self.heads.pages.shape[3]

    def _pages_of(self, row: Array) -> Array:
        pages = self.heads.table.page_indices
        own = jax.lax.dynamic_slice(pages, (row, jnp.int32(0)), (1, pages.shape[1]))
        return padded_pages(own, self._block_pages)

    def _is_cheaper_expanded(self, row: "_Row") -> Array:
        """bool[], by the products of the module's docstring."""
        heads, rank = self.heads, self.heads.spec.rank
        rope, each = heads.width - rank, heads.inputs.projections.base.shape[1]
        saved = (2 * rank + rope) - (each + rope)
        spent = rank * each
        new = row.count.astype(jnp.float32)
        old = np.float32(1) - new / jnp.maximum(row.kv_len, 1).astype(jnp.float32)
        return new * np.float32(saved) > np.float32(spent) * old

    def _latents(self, row: "_Row", index: Array) -> tuple[Array, Array]:
        """A block's latents [block, rank + rope], and i32[block] their positions."""
        here = jax.lax.dynamic_slice(row.pages, (jnp.int32(0), index * self._block_pages), (1, self._block_pages))
        position = index * self._block + jnp.arange(self._block, dtype=jnp.int32)
        return _known(self.heads.gather(here)[0], position < row.kv_len), position

    def _positions(self, row: "_Row", index: Array) -> Array:
        """i32[tile] of a tile's queries."""
        return row.kv_len - row.count + index * self.tile + jnp.arange(self.tile, dtype=jnp.int32)

    def _absorb(self, row: "_Row", index: Array, state: State) -> State:
        """The state with that of a tile, absorbed."""
        begin, rank = row.first + index * self.tile, self.heads.spec.rank
        q, q_rotated = (_cut(x, begin, self.tile).swapaxes(0, 1) for x in self.queries)
        tokens = jnp.full(self.tile, row.first)
        wide = self.heads.absorbed(q, q_rotated, tokens)
        position = self._positions(row, index)

        def attend(block: Array, state: State) -> State:
            latents, keys = self._latents(row, block)
            is_seen = self.heads.is_seen(keys[None], position[:, None]) & (keys < row.kv_len)[None]
            scores = product("thw,bw->thb", wide, latents)
            return accumulate(state, jnp.where(is_seen[:, None, :], scores, MASKED), latents[:, :rank])

        end = (jnp.minimum(position[-1] + 1, row.kv_len) + (self._block - 1)) // self._block
        own = jax.lax.fori_loop(jnp.int32(0), end, attend, start(wide.shape[:2], rank))
        done = self.heads.values_of(settle(own), tokens).swapaxes(0, 1)
        none = jnp.zeros(done.shape[:2], jnp.float32)
        new: State = _put(state, (none, none + np.float32(1), done), begin)
        return new

    def _expand(self, row: "_Row", block: Array, tiles: Array, state: State) -> State:
        """The state with a block of keys for all tiles of a row that see some of it."""
        heads, rank = self.heads, self.heads.spec.rank
        latents, position = self._latents(row, block)
        expanded = heads.inputs.projections.expanded(latents[:, :rank], row.first)
        keys, values = (x.astype(latents.dtype) for x in expanded)

        def attend(index: Array, state: State) -> State:
            begin = row.first + index * self.tile
            q, q_rotated = (_cut(x, begin, self.tile) for x in self.queries)
            scores = product("htn,hbn->htb", q, keys) + product("htp,bp->htb", q_rotated, latents[:, rank:])
            queries = self._positions(row, index)
            is_seen = heads.is_seen(position[None], queries[:, None]) & (position < row.kv_len)[None]
            masked = jnp.where(is_seen[None], scores * np.float32(heads.spec.scale), MASKED)
            before = jax.tree.map(lambda x: _cut(x, begin, self.tile), state)
            empty = start(before[0].shape, values.shape[-1])
            known = jax.tree.map(lambda new, old: jnp.where(block == 0, new, old), empty, before)
            new: State = _put(state, accumulate(known, masked, values), begin)
            return new

        context = row.kv_len - row.count
        nearest = jnp.maximum(block * self._block - context, 0) // self.tile
        walked: State = jax.lax.fori_loop(nearest, tiles, attend, state)
        return walked


@dataclass(frozen=True)
class _Row:
    """One row of a step, its numbers i32[]."""

    first: Array
    """Its first token of the step."""
    count: Array
    """Its tokens in the step."""
    kv_len: Array
    pages: Array
    """i32[1, pages]"""


def _widened(x: Array) -> Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _stored(x: Array, dtype: np.dtype) -> Array:
    """Numbers in the dtype of pages; as bits if that is BITS."""
    if dtype != BITS:
        return x.astype(dtype)
    bits: Array = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    return bits


def _numbers(x: Array) -> Array:
    """The inverse of ``_stored``."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == BITS else x


def _known(latents: Array, is_known: Array) -> Array:
    """Latents [..., width], 0 where a page has another owner's: perhaps NaN, and 0 * NaN is NaN."""
    return jnp.where(is_known[..., None], latents, np.array(0, latents.dtype))


def _by_head(x: Array, padding: int) -> Array:
    """[T, heads, n] -> [heads, T + padding, n]"""
    return jnp.pad(x, ((0, padding), (0, 0), (0, 0))).swapaxes(0, 1)


def _cut(x: Array, begin: Array, count: int) -> Array:
    """[heads, T, ...] -> [heads, count, ...]"""
    return jax.lax.dynamic_slice_in_dim(x, begin, count, axis=1)


def _put(whole: Any, part: Any, begin: Array) -> Any:
    """The trees' arrays [heads, T, ...] with those of ``part`` from ``begin`` on."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, begin, axis=1), whole, part)
