"""The arguments of all attention kernels: the scores, the pages, and the tokens of a step.

A step's tokens are one flat batch. Row i of ``num_seqs[0]`` rows owns the queries
``cu_q_lens[i]:cu_q_lens[i + 1]``, the last of its ``kv_lens[i]`` tokens. Its keys and values are
in the pages ``page_indices[i]``, in order. The idea is Kwon et al. 2023; the argument names are
those of ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``.

The scheduler puts rows of a single query first, so a kernel can compute all decoding rows at
once and the other rows a tile at a time.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.latent_projections import LatentProjections
from caching.page_manager import SINK_PAGE


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer scores keys. Hashable: a kernel is compiled for each spec."""

    scale: float
    """Scores are ``q @ k * scale``."""
    window: int | None = None
    """How many keys a query sees, its own included; None is all."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; None is no cap."""
    chunk: int | None = None
    """A query sees the keys behind the last multiple of it alone, as in Llama 4; None is all."""
    first: int = 0
    """No query but the first ones themselves sees the keys before this position: they are of no
    token that the layer is trained with (a draft head's first one)."""

    @property
    def sees_all(self) -> bool:
        """Whether a query sees all keys up to its own."""
        return self.reach is None and not self.first

    @property
    def reach(self) -> int | None:
        """The most keys that a query sees; None is all."""
        return self.window or self.chunk

    def first_seen(self, positions: Array) -> Array:
        """i32[...] positions of queries -> i32[...] of the first key that each sees."""
        first = jnp.minimum(positions, self.first) if self.first else jnp.zeros_like(positions)
        if self.chunk is not None:
            return jnp.maximum(first, jax.lax.div(positions, jnp.int32(self.chunk)) * np.int32(self.chunk))
        if self.window is not None:
            return jnp.maximum(first, positions - (self.window - 1))
        return first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Which row each query belongs to and where its keys and values are. All i32."""

    kv_lens: Array
    """[rows] tokens of each row, this step's queries included; 0 in padding rows."""
    page_indices: Array
    """[rows, pages_per_seq]; of a whole step [groups, rows, pages_per_seq], a table for each group
    of layers. Behind a window and past a row's tokens are another's pages, perhaps with NaN."""
    cu_q_lens: Array
    """[rows + 1] where each row's queries begin; padding rows repeat the total."""
    num_seqs: Array
    """[1] rows that are not padding."""

    @property
    def q_lens(self) -> Array:
        """[rows] queries of each row; 0 in padding rows."""
        return self.cu_q_lens[1:] - self.cu_q_lens[:-1]

    @property
    def num_decodes(self) -> Array:
        """[] how many rows are in front of the first that has not one query."""
        return jnp.sum(jnp.cumprod((self.q_lens == 1).astype(jnp.int32)), dtype=jnp.int32)

    def locate(self, num_tokens: int, page_size: int) -> tuple[Array, Array]:
        """Page and offset i32[num_tokens] of each token; padding tokens get the sink page."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.cu_q_lens[1:], token, side="right").astype(jnp.int32)
        real = row < self.num_seqs[0]
        row = jnp.where(real, row, 0)
        position = jnp.where(real, self.kv_lens[row] - self.cu_q_lens[row + 1] + token, 0)
        page = self.page_indices[row, position // page_size]
        return jnp.where(real, page, SINK_PAGE), position % page_size

    def of_layer(self, group: Array | int, first: Array | None) -> "PageTable":
        """A layer's table: its group's; its pages begin at i32[] ``first`` of an array of
        several layers, if there is one."""
        page_indices = self.page_indices[group]
        return replace(self, page_indices=page_indices if first is None else page_indices + first)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheView:
    """One layer's part of the cache, as a step sees it."""

    pages: Array
    """In the kernel's layout; a kernel returns the same memory."""
    table: PageTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's attention for the T tokens of a step."""

    q: Array
    """f[T, heads, head_dim]"""
    k: Array | None
    """f[T, kv_heads, head_dim]; None if another layer has written the step's keys and values."""
    v: Array | None
    """Like k."""
    rotation: tuple[Array, Array] | None = None
    """Cosines and sines f32[T, 1, pairs] for a kernel that ``fuses_rotation``.

    Of a head's first 2 * pairs dimensions, i turns with i + pairs. Other kernels get rotated q and
    k, and None here."""
    sinks: Array | None = None
    """f32[heads] score of a key without a value that every query of a head sees (gpt-oss)."""
    together: Array | None = None
    """f[T, kv_heads, group + 2, head_dim] the queries of each kv head, its key and its value, if these
    are parts of one array as they are; None for kernels that do not ``fuses_rotation``."""


@dataclass(frozen=True)
class LatentSpec:
    """How a layer of multi-head latent attention (DeepSeek-V2) scores keys. Hashable.

    A token has one latent for all heads: ``rank`` numbers that each head's keys and values are
    projections of, and behind them a key that is rotated by its position and shared by the heads.
    """

    scale: float
    """Scores are ``q @ k * scale``."""
    rank: int
    first: int = 0
    """As in AttentionSpec."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentInputs:
    """The inputs of one layer's latent attention for the T tokens of a step."""

    q: Array
    """f[T, heads, nope], which scores a head's own keys."""
    q_rotated: Array
    """f[T, heads, rope], which scores the shared key."""
    latents: Array
    """f[T, rank + rope]"""
    projections: LatentProjections
    """Of latents to keys and values."""


class LatentKernel(Protocol):
    """Latent attention over pages [num_pages, 1, 1, page_size, width]. Hashable.

    A page has the latents of its tokens, perhaps with zeros behind them. Devices that split the
    heads have all latents each.
    """

    @property
    def fuses_rotation(self) -> bool:
        """As in AttentionKernel."""

    def __call__(self, spec: LatentSpec, view: CacheView, inputs: LatentInputs) -> tuple[Array, Array]:
        """Write the step's latents into their pages, then attend.

        Returns the pages, in place when donated, and f[T, heads, v]. Padding rows are finite but
        undefined.
        """


class AttentionKernel(Protocol):
    """Attention over pages. Hashable: a step is traced for each kernel."""

    @property
    def fuses_rotation(self) -> bool:
        """Whether the kernel itself rotates q and k."""

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """Write the step's k and v into their pages, then attend.

        Returns the pages, in place when donated, and f[T, heads, head_dim]. Padding rows are
        finite but undefined.
        """


Kernel = AttentionKernel | LatentKernel
"""Of a model's layers; all have the same."""
