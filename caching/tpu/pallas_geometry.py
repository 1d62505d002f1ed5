"""Shared by the parts of our TPU attention kernel: static sizes, the page table, bits of pages.

A page is ``[kv_heads, page_size, width]``: for each head a matrix with a row per token, the key in
the first half of the lanes and the value in the second. So a head's page goes to the matrix unit
as it is, for any dtype and number of heads, and keys and values of 64 fill a register together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from caching.tpu.jax_attention import TABLE_BYTES
from caching.tpu.tpu_chip import LANES, SUBLANES

Ref = Any
"""A reference to memory inside a kernel; Pallas has no public type for it."""


def granule(dtype: np.dtype) -> int:
    """Tokens of a page that share a register: the smallest unit of a transfer."""
    return SUBLANES * (4 // dtype.itemsize)


def piece(page_size: int, dtype: np.dtype) -> int:
    """The unit of reads of a row's last page, in tokens: a quarter page if transfers allow it."""
    return page_size // 4 if page_size % (4 * granule(dtype)) == 0 else page_size


@dataclass(frozen=True)
class Geometry:
    """Sizes of one compiled kernel."""

    tokens: int
    rows: int
    kv_heads: int
    group: int
    """Query heads per kv head."""
    page_size: int
    table: "TableBlocks"
    width: int
    """Lanes of a token in a page, key and value together."""
    block_pages: int
    """Pages computed together."""
    dtype: np.dtype
    """The dtype of the pages."""

    @property
    def packing(self) -> int:
        """Tokens of a page that share 32 bits."""
        return 4 // self.dtype.itemsize

    @property
    def granule(self) -> int:
        """Tokens that share a register."""
        return granule(self.dtype)

    @property
    def piece(self) -> int:
        """The unit of reads of a row's last page, in tokens."""
        return piece(self.page_size, self.dtype)

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.block_pages * self.page_size

    @property
    def halved(self) -> bool:
        """Whether keys and values have registers of their own.

        If not, a query has zeros in the values' lanes, and its result garbage in the keys' lanes.
        """
        return self.width // 2 % LANES == 0

    @property
    def head_width(self) -> int:
        """Lanes of a query, and of its result."""
        return self.width // 2 if self.halved else self.width


@dataclass(frozen=True)
class TableBlocks:
    """How a page table is cut into blocks of rows: scalar memory has one block at a time."""

    rows: int
    """Of a block."""
    width: int
    """Of the padded table."""

    @property
    def size(self) -> int:
        """Entries of a block."""
        return self.rows * self.width

    def padded(self, page_indices: Array) -> Array:
        """i32[rows, pages_per_seq] -> i32[blocks * size]; one dimension is not padded again."""
        rows, pages_per_seq = page_indices.shape
        missing = (0, -rows % self.rows), (0, self.width - pages_per_seq)
        return jnp.pad(page_indices, missing).reshape(-1)


def table_blocks(rows: int, pages_per_seq: int) -> TableBlocks:
    """The largest blocks that scalar memory holds, of rows of at most MOST_PAGES_PER_SEQ.

    A block begins at a multiple of SUBLANES * LANES entries, where a transfer may begin: long rows
    are padded to that, short ones are kept SUBLANES together.
    """
    unit = 1 if pages_per_seq > SUBLANES * LANES else SUBLANES
    columns = SUBLANES * LANES // unit
    width = -(-pages_per_seq // columns) * columns
    most = TABLE_BYTES // (4 * width) // unit * unit
    return TableBlocks(min(most, -(-rows // unit) * unit), width)


class Table(NamedTuple):
    """The step's rows as in ``PageTable``, in scalar memory."""

    kv_lens: Ref
    cu_q_lens: Ref
    counts: Ref
    """i32[2]: leading rows of a single query, and all rows."""
    blocks: TableBlocks
    page_indices: Ref
    """i32[blocks.size]: the block of the rows from ``begin`` to ``past``."""
    begin: Array
    past: Array

    def page(self, row: Array, index: Array) -> Array:
        """The page of a row of the block."""
        page: Array = self.page_indices[(row - self.begin) * self.blocks.width + index]
        return page

    def decodes(self) -> tuple[Array, Array]:
        """The rows of a single query in the block: the first, and the one behind the last."""
        return self.begin, jnp.minimum(self.past, self.counts[0])

    def others(self) -> tuple[Array, Array]:
        """The same of the other rows."""
        return jnp.maximum(self.begin, self.counts[0]), self.past


def as_words(stored: Array) -> Array:
    """Tokens [n, width] of a page -> i32[n / packing, width]."""
    return stored if stored.dtype == jnp.int32 else pltpu.bitcast(stored, jnp.int32)


def as_tokens(words: Array, dtype: np.dtype) -> Array:
    """The inverse of as_words."""
    return pltpu.bitcast(words, dtype)


def bits_before(geometry: Geometry, shape: tuple[int, ...], token: Array) -> Array:
    """The bits of words i32[granule / packing, width] that tokens before i32[] ``token`` have."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    partial = jnp.left_shift(jnp.int32(1), token % geometry.packing * (32 // geometry.packing)) - 1
    word = token // geometry.packing
    return jnp.where(row < word, jnp.int32(-1), jnp.where(row == word, partial, jnp.int32(0)))


def bits_of(geometry: Geometry, shape: tuple[int, ...], token: Array) -> Array:
    """The bits of words i32[granule / packing, width] that i32[] ``token`` has."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    bits = 32 // geometry.packing
    ones = jnp.left_shift(jnp.int32(-1 if bits == 32 else (1 << bits) - 1), token % geometry.packing * bits)
    return jnp.where(row == token // geometry.packing, ones, jnp.int32(0))
