"""A softmax over keys that come a block at a time (Milakov and Gimelshein 2018).

Its state is the highest score so far, the total of weights relative to it, and the values summed
by them: f32[..., q], f32[..., q] and f32[..., q, head_dim].
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.page_manager import SINK_PAGE

MASKED = -1e30
"""Score of a masked key; finite, so that a row or a block without keys gives numbers and not NaN."""


def padded_pages(page_indices: Array, block_pages: int) -> Array:
    """The page table, widened with the sink so that a block never reads past its end."""
    width = page_indices.shape[1]
    return jnp.pad(page_indices, ((0, 0), (0, -width % block_pages)), constant_values=SINK_PAGE)


def without_stale(values: Array, firsts: Array, lens: Array, position: Array) -> Array:
    """Values [..., kv_heads, c, head_dim] at i32[c] positions, 0 before i32[...] firsts and from
    i32[...] lens on.

    Pages there have another owner's values, perhaps NaN, and 0 * NaN is NaN.
    """
    known = (position < lens[..., None]) & (position >= firsts[..., None])
    return jnp.where(known[..., None, :, None], values, np.array(0, values.dtype))


def accumulate(state: tuple[Array, Array, Array], scores: Array, values: Array) -> tuple[Array, Array, Array]:
    """One block of a running softmax: scores f32[..., q, c] with values [..., c, head_dim]."""
    high, total, weighted = state
    higher = jnp.maximum(high, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - higher[..., None])
    shrink = jnp.exp(high - higher)
    added = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return higher, total * shrink + jnp.sum(weights, axis=-1), weighted * shrink[..., None] + added


def start(lead: tuple[int, ...], head_dim: int, sinks: Array | None = None) -> tuple[Array, Array, Array]:
    """The state of a running softmax of shape ``lead`` before any key; sinks broadcast to it."""
    weighted = jnp.zeros((*lead, head_dim), jnp.float32)
    if sinks is None:
        return jnp.full(lead, MASKED, jnp.float32), jnp.zeros(lead, jnp.float32), weighted
    return jnp.broadcast_to(sinks, lead), jnp.ones(lead, jnp.float32), weighted


def settle(state: tuple[Array, Array, Array]) -> Array:
    """The weighted means f32[..., q, head_dim] of a running softmax; zeros without keys."""
    _, total, weighted = state
    return weighted / jnp.maximum(total, np.float32(1e-30))[..., None]
