"""What the second part of our TPU attention kernel computes together, and which keys that sees.

A span is queries of one row: one for a decoding row, up to a tile of them for others. All of this
is arithmetic over the step's rows; nothing is fetched or computed here.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from caching.attention.spec import AttentionSpec
from caching.tpu.pallas_geometry import Geometry, Table


class Span(NamedTuple):
    """Queries that are computed together. All i32 scalars."""

    row: Array
    token: Array
    """The index of the first one in the step."""
    queries: Array
    position: Array
    """The position of the first one in its row."""
    first_page: Array
    """Index in the row of the first page that they see."""
    past_page: Array


@dataclass(frozen=True)
class Spans:
    """The spans, of up to ``tile`` queries, of rows ``begin`` to ``past`` of a step."""

    geometry: Geometry
    spec: AttentionSpec
    table: Table
    tile: int
    begin: Array
    past: Array

    def count(self, row: Array) -> Array:
        """Spans of a row."""
        spans: Array = (self.table.cu_q_lens[row + 1] - self.table.cu_q_lens[row] + (self.tile - 1)) // self.tile
        return spans

    def at(self, row: Array, index: Array) -> Span:
        """A row's span."""
        first, past = self.table.cu_q_lens[row], self.table.cu_q_lens[row + 1]
        token = first + index * self.tile
        queries = jnp.minimum(past - token, self.tile)
        position = self.table.kv_lens[row] - past + token
        page_size = self.geometry.page_size
        past_page = (position + queries + (page_size - 1)) // page_size
        return Span(row, token, queries, position, self.spec.first_seen(position) // page_size, past_page)

    def after(self, span: Span, index: Array) -> tuple[Span, Array]:
        """The span behind its row's ``index``-th, and whether there is one."""
        ends = index + 1 == self.count(span.row)
        row = jnp.where(ends, span.row + 1, span.row)
        return self.at(jnp.minimum(row, self.past - 1), jnp.where(ends, 0, index + 1)), row < self.past

    def blocks(self, span: Span) -> Array:
        """Blocks of pages that a span sees."""
        size = self.geometry.block_pages
        return (span.past_page - span.first_page + (size - 1)) // size

    def first_fetched(self, span: Span) -> Array:
        """A tile begins at its span, or earlier if it would end after the step's last token."""
        return jnp.minimum(span.token, self.geometry.tokens - self.tile)

    def seen(self, span: Span, start: Array) -> Array:
        """bool[tile * group, block]: the keys, from the row's ``start``-th on, that each query sees."""
        shape = (self.tile * self.geometry.group, self.geometry.block)
        query = span.position - (span.token - self.first_fetched(span))
        query += jax.lax.broadcasted_iota(jnp.int32, shape, 0) // self.geometry.group
        key = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = key <= query
        return seen if self.spec.sees_all else seen & (key >= self.spec.first_seen(query))
