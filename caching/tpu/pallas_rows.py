"""The second part of our TPU attention kernel: queries attend to the pages of their row.

A span (caching/tpu/pallas_spans.py) reads only the pages that its queries see, block by block with
a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022). While one block is computed, the
next one is fetched, even if it belongs to the next span.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from caching.attention.running_softmax import MASKED
from caching.tpu.pallas_geometry import Geometry, Ref, as_tokens, as_words, bits_before
from caching.tpu.pallas_spans import Span, Spans

UNROLLED_HEADS = 8
"""The most heads of a decoding row that are unrolled; more take the compiler too long."""


def attend_rows(spans: Spans, pages: Ref, q: Ref, out: Ref, sinks: Ref | None) -> None:
    """Compute all spans, one after the other, of queries ``q`` [T, kv_heads, group, head_width].

    Results go to ``out``, like q. ``sinks`` are f32[kv_heads, tile * group, 1].
    """
    geometry, size = spans.geometry, spans.tile * spans.geometry.group
    kv_heads, width = geometry.kv_heads, geometry.head_width
    a_tile = (spans.tile, kv_heads, geometry.group, width)
    pl.run_scoped(
        lambda *refs: _Rows(spans, pages, q, out, sinks, *refs).attend(),
        pltpu.VMEM((2, geometry.block_pages, kv_heads, geometry.page_size, geometry.width), geometry.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((2, *a_tile), q.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((kv_heads, size, width), q.dtype),
        pltpu.VMEM((kv_heads, size, 1), jnp.float32),
        pltpu.VMEM((kv_heads, size, 1), jnp.float32),
        pltpu.VMEM((kv_heads, size, width), jnp.float32),
        pltpu.VMEM(a_tile, out.dtype),
        pltpu.SemaphoreType.DMA,
    )


@dataclass(frozen=True)
class _Rows:
    """The rows of some spans; from ``kv`` on, on-chip memory: blocks of pages, the queries of a span, their result so far."""

    spans: Spans
    pages: Ref
    q: Ref
    out: Ref
    sinks: Ref | None
    kv: Ref
    """[2, block_pages, kv_heads, page_size, width]"""
    kv_arrived: Ref
    """[2] semaphores, one for each block"""
    queries: Ref
    """[2, tile, kv_heads, group, head_width] as fetched, of this span and the next."""
    queries_arrived: Ref
    rows: Ref
    """[kv_heads, tile * group, head_width] transposed for the product."""
    high: Ref
    """f32[kv_heads, tile * group, 1] the largest score so far."""
    total: Ref
    """Like ``high``: the sum of exponentials."""
    weighted: Ref
    """f32[kv_heads, tile * group, head_width] the sum of values weighted by exponentials."""
    results: Ref
    """[tile, kv_heads, group, head_width] results before they are written to HBM."""
    results_left: Ref

    @property
    def geometry(self) -> Geometry:
        """Sizes of the compiled kernel."""
        return self.spans.geometry

    def attend(self) -> None:
        """Compute all spans."""

        @pl.when(self.spans.begin < self.spans.past)
        def _() -> None:
            span = self.spans.at(self.spans.begin, jnp.int32(0))
            self._fetch_queries(span, jnp.int32(0))
            self._fetch(span, jnp.int32(0), jnp.int32(0))

        def one_row(row: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            after: tuple[Array, Array, Array] = jax.lax.fori_loop(
                0, self.spans.count(row), lambda index, state: self._one_span(row, index, state), state
            )
            return after

        start = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
        _, _, pending = jax.lax.fori_loop(self.spans.begin, self.spans.past, one_row, start)
        self._await_results(pending)

    def _one_span(self, row: Array, index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """State: slot of the next block, slot of the queries, pending writes of the last span."""
        slot, place, pending = state
        span = self.spans.at(row, index)
        following, exists = self.spans.after(span, index)
        blocks = self.spans.blocks(span)
        self.high[...] = jnp.full(self.high.shape, MASKED, jnp.float32) if self.sinks is None else self.sinks[...]
        self.total[...] = jnp.full(self.total.shape, 0 if self.sinks is None else 1, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)
        self._take_queries(span, place)

        def one_block(block: Array, slot: Array) -> Array:
            last = block + 1 == blocks

            @pl.when(jnp.logical_not(last))
            def _() -> None:
                self._fetch(span, block + 1, 1 - slot)

            @pl.when(last & exists)
            def _() -> None:
                self._fetch_queries(following, 1 - place)
                self._fetch(following, jnp.int32(0), 1 - slot)

            self._await_fetched(span, block, slot)
            start = (span.first_page + block * self.geometry.block_pages) * self.geometry.page_size
            self._clear(slot, span.position + span.queries - start)
            jax.lax.fori_loop(
                0,
                self.geometry.kv_heads,
                lambda head, _: self._accumulate(slot, head, span, start),
                None,
                unroll=self.spans.tile == 1 and self.geometry.kv_heads <= UNROLLED_HEADS,
            )
            return 1 - slot

        slot = jax.lax.fori_loop(0, blocks, one_block, slot)
        self._await_results(pending)
        self._give_results(span)
        return slot, 1 - place, span.queries

    def _fetch(self, span: Span, block: Array, slot: Array) -> None:
        self._for_each_copy(span, block, slot, lambda copy: copy.start())

    def _await_fetched(self, span: Span, block: Array, slot: Array) -> None:
        self._for_each_copy(span, block, slot, lambda copy: copy.wait())

    def _for_each_copy(self, span: Span, block: Array, slot: Array, act: Callable[[Ref], None]) -> None:
        """Copies of a block: whole pages, and of the last page only the pieces with tokens."""
        geometry = self.geometry
        first, last = span.first_page + block * geometry.block_pages, span.past_page - 1

        def copy(page: Array, begin: Array | int, tokens: int) -> Ref:
            entry = self.spans.table.page(span.row, page)
            place = self.kv.at[slot, page - first, :, pl.ds(begin, tokens), :]
            source = self.pages.at[entry, :, pl.ds(begin, tokens), :]
            return pltpu.make_async_copy(source, place, self.kv_arrived.at[slot])

        @pl.loop(first, jnp.minimum(first + geometry.block_pages, last))
        def _(page: Array) -> None:
            act(copy(page, 0, geometry.page_size))

        @pl.when(last < first + geometry.block_pages)
        def _() -> None:
            in_page = span.position + span.queries - last * geometry.page_size

            @pl.loop(0, (in_page + (geometry.piece - 1)) // geometry.piece)
            def _(piece: Array) -> None:
                act(copy(last, pl.multiple_of(piece * geometry.piece, geometry.piece), geometry.piece))

    def _queries(self, span: Span, place: Array) -> Ref:
        source = self.q.at[pl.ds(self.spans.first_fetched(span), self.spans.tile)]
        return pltpu.make_async_copy(source, self.queries.at[place], self.queries_arrived.at[place])

    def _fetch_queries(self, span: Span, place: Array) -> None:
        self._queries(span, place).start()

    def _take_queries(self, span: Span, place: Array) -> None:
        self._queries(span, place).wait()
        for head in range(self.geometry.kv_heads):
            self.rows[head] = self.queries[place, :, head].reshape(self.rows.shape[1:])

    def _clear(self, slot: Array, valid: Array) -> None:
        """Zero the tokens after the first ``valid`` of a block.

        They are a former owner's, perhaps NaN, and 0 * NaN is NaN.
        """
        geometry = self.geometry
        in_page = geometry.page_size // geometry.granule

        def place(granule: Array) -> tuple[Array, Ref]:
            return granule // in_page, pl.ds(
                pl.multiple_of(granule % in_page * geometry.granule, geometry.granule), geometry.granule
            )

        @pl.when(valid < geometry.block)
        def _() -> None:
            partly = valid // geometry.granule
            page, tokens = place(partly)
            for head in range(geometry.kv_heads):
                words = as_words(self.kv[slot, page, head, tokens, :])
                kept = words & bits_before(geometry, words.shape, valid % geometry.granule)
                self.kv[slot, page, head, tokens, :] = as_tokens(kept, geometry.dtype)

            @pl.loop(partly + 1, geometry.block // geometry.granule)
            def _(granule: Array) -> None:
                page, tokens = place(granule)
                shape = (geometry.kv_heads, geometry.granule, geometry.width)
                self.kv[slot, page, :, tokens, :] = jnp.zeros(shape, geometry.dtype)

    def _accumulate(self, slot: Array, head: Array, span: Span, start: Array) -> None:
        """Add one head's block, whose first token is the row's ``start``-th, to the softmax."""
        geometry, q = self.geometry, self.rows[head]
        kv = self.kv[slot, :, head].reshape(geometry.block, geometry.width).astype(q.dtype)
        keys, values = (kv[:, : geometry.head_width], kv[:, -geometry.head_width :]) if geometry.halved else (kv, kv)
        scores = jnp.where(self.spans.seen(span, start), self._scores(q, keys), np.float32(MASKED))
        high, total, weighted = self.high[head], self.total[head], self.weighted[head]
        higher = jnp.maximum(high, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(high - higher)
        added = _matmul(weights.astype(q.dtype), values, contract=0)
        self.high[head] = higher
        self.total[head] = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        self.weighted[head] = weighted * shrink + added

    def _scores(self, q: Array, keys: Array) -> Array:
        scores = _matmul(q, keys, contract=1) * np.float32(self.spans.spec.scale)
        cap = self.spans.spec.soft_cap
        return scores if cap is None else np.float32(cap) * jnp.tanh(scores * np.float32(1 / cap))

    def _give_results(self, span: Span) -> None:
        for head in range(self.geometry.kv_heads):
            result = self.weighted[head] / jnp.maximum(self.total[head], np.float32(1e-30))
            shape = (self.spans.tile, self.geometry.group, self.geometry.head_width)
            self.results[:, head] = result.astype(self.out.dtype).reshape(shape)

        @pl.loop(0, span.queries)
        def _(query: Array) -> None:
            place = span.token - self.spans.first_fetched(span) + query
            self._result(place, span.token + query).start()

    def _result(self, place: Array, token: Array) -> Ref:
        return pltpu.make_async_copy(self.results.at[place], self.out.at[token], self.results_left)

    def _await_results(self, pending: Array) -> None:
        @pl.loop(0, pending)
        def _(query: Array) -> None:
            self._result(query, query).wait()


def _matmul(a: Array, b: Array, *, contract: int) -> Array:
    """a[m, k] @ b, contracted over axis ``contract`` of b, in f32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
