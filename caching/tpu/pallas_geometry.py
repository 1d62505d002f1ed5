"""What the parts of our TPU attention kernel agree on: sizes known when it is compiled, the step's table, bits of pages.

A page is ``[kv_heads, page_size, width]``: for each head a matrix with a row for each token, its key in the first half of the
lanes and its value in the second. So a head's page is what the matrix unit takes, as it lies, for any dtype and any number
of heads; and keys and values of 64 fill a register's lanes together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
"""A vector register holds so many numbers of 32 bits."""

Ref = Any
"""A reference to memory inside a kernel; Pallas has no public type for it."""


def granule(dtype: np.dtype) -> int:
    """Tokens of a page that share a register: fewer are not moved."""
    return SUBLANES * (4 // dtype.itemsize)


def piece(page_size: int, dtype: np.dtype) -> int:
    """Tokens of a row's last page that are read at once, if any of them is needed: a quarter, where that can be moved."""
    return page_size // 4 if page_size % (4 * granule(dtype)) == 0 else page_size


@dataclass(frozen=True)
class Geometry:
    """Sizes of one compiled kernel."""

    tokens: int
    kv_heads: int
    group: int
    """Query heads of a kv head."""
    page_size: int
    pages_per_seq: int
    width: int
    """Lanes of a token in a page, key and value together."""
    block_pages: int
    """Pages that are computed with at once."""
    dtype: np.dtype
    """Of the pages."""

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
        """Tokens of a row's last page that are read at once."""
        return piece(self.page_size, self.dtype)

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.block_pages * self.page_size

    @property
    def halved(self) -> bool:
        """Whether keys and values are registers of their own.

        Where they are not, a query has zeros where the values are, and its result garbage where the keys are.
        """
        return self.width // 2 % LANES == 0

    @property
    def head_width(self) -> int:
        """Lanes of a query, and of its result."""
        return self.width // 2 if self.halved else self.width


class Table(NamedTuple):
    """The step's rows as in ``PageTable``, in scalar memory."""

    kv_lens: Ref
    page_indices: Ref
    """i32[rows * pages_per_seq]: a single dimension is not padded."""
    cu_q_lens: Ref
    counts: Ref
    """i32[2] rows of a single query that come first, and rows."""


def as_words(stored: Array) -> Array:
    """Tokens [n, width] of a page -> i32[n / packing, width]."""
    return stored if stored.dtype == jnp.int32 else pltpu.bitcast(stored, jnp.int32)


def as_tokens(words: Array, dtype: np.dtype) -> Array:
    """The inverse of as_words."""
    return pltpu.bitcast(words, dtype)


def bits_before(geometry: Geometry, shape: tuple[int, ...], token: Array) -> Array:
    """Of words i32[granule / packing, width], those bits that tokens before the i32 ``token`` of the granule have."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    partial = jnp.left_shift(jnp.int32(1), token % geometry.packing * (32 // geometry.packing)) - 1
    word = token // geometry.packing
    return jnp.where(row < word, jnp.int32(-1), jnp.where(row == word, partial, jnp.int32(0)))


def bits_of(geometry: Geometry, shape: tuple[int, ...], token: Array) -> Array:
    """Of words i32[granule / packing, width], those bits that ``token`` has."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    bits = 32 // geometry.packing
    ones = jnp.left_shift(jnp.int32(-1 if bits == 32 else (1 << bits) - 1), token % geometry.packing * bits)
    return jnp.where(row == token // geometry.packing, ones, jnp.int32(0))
