"""What all attention kernels take: how scores are made, where keys and values are, and what a step brings.

A step's tokens are one flat batch. Row i of ``num_seqs[0]`` rows owns the queries
``cu_q_lens[i]:cu_q_lens[i + 1]``, which are the last of its ``kv_lens[i]`` tokens; their keys and values are in
the pages ``page_indices[i]``, in order. Argument names follow the Pallas TPU kernel (Kwon et al. 2023 for the
idea; ``jax.experimental.pallas.ops.tpu.ragged_paged_attention`` for the names).

Rows of a single query come first: that is how the scheduler lays out a step, and it lets a kernel
compute all decoding rows at once and the others a tile at a time.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from caching.page_manager import SINK_PAGE


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer's scores are made of queries and keys. Hashable: a kernel is compiled for one."""

    scale: float
    """Scores are ``q @ k * scale``."""
    window: int | None = None
    """How many keys, its own included, a query sees; None is all."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; None leaves them as they are."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Which row each query belongs to and where its keys and values are. All i32."""

    kv_lens: Array
    """[rows] tokens of each row, this step's queries included; 0 in padding rows."""
    page_indices: Array
    """[rows, pages_per_seq]"""
    cu_q_lens: Array
    """[rows + 1] where each row's queries begin; padding rows repeat the total."""
    num_seqs: Array
    """[1] rows that are not padding."""

    def locate(self, num_tokens: int, page_size: int) -> tuple[Array, Array]:
        """Page and offset i32[num_tokens] of each token; padding tokens (after the last row's) go to the sink."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.cu_q_lens[1:], token, side="right").astype(jnp.int32)
        real = row < self.num_seqs[0]
        row = jnp.where(real, row, 0)
        position = jnp.where(real, self.kv_lens[row] - self.cu_q_lens[row + 1] + token, 0)
        page = self.page_indices[row, position // page_size]
        return jnp.where(real, page, SINK_PAGE), position % page_size

    def from_page(self, first: Array) -> "PageTable":
        """The table of a layer whose pages begin at i32[] ``first`` of an array that several layers share."""
        return replace(self, page_indices=self.page_indices + first)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheView:
    """One layer's part of the cache, as a step sees it."""

    pages: Array
    """Laid out as the kernel reads them; what a kernel returns in their place is the same memory."""
    table: PageTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """What one layer computes for the T tokens of a step."""

    q: Array
    """f[T, heads, head_dim]"""
    k: Array
    """f[T, kv_heads, head_dim]"""
    v: Array
    """Like k."""
    rotation: tuple[Array, Array] | None = None
    """Cosines and sines f32[T, 1, head_dim / 2], by which a kernel that ``fuses_rotation`` is to rotate q and k.

    Other kernels get q and k rotated, and None here."""
    sinks: Array | None = None
    """f32[heads] the score of a key without a value that every query of a head sees, as in gpt-oss."""


class AttentionKernel(Protocol):
    """Attention over pages. Hashable: a step is traced for one."""

    @property
    def fuses_rotation(self) -> bool:
        """Whether it rotates q and k itself, as it reads them."""

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """Write the step's k and v into their pages, then attend.

        Returns the pages, in place when donated, and f[T, heads, head_dim]; rows of padding are finite but undefined.
        """
