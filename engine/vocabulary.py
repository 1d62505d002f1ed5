"""The vocabulary of logits f32[rows, vocab], of which each of several devices has a part, in the order of the tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

VOCABULARY_BLOCK = 128
"""Tokens that the sampler reduces together. Each device has whole blocks, so that draws do not depend on the number of
devices."""

NO_TOKEN_LOGIT = np.float32(-3e38)
"""The logit of an id that pads the vocabulary and is no token."""

MAX_EOS_TOKEN_IDS = 32
"""Ids that may end a model's output; no known model has a quarter as many."""


def padded_vocab_size(vocab_size: int, devices: int) -> int:
    """The vocabulary, padded so that each of several devices has the same number of whole blocks."""
    even = devices * VOCABULARY_BLOCK
    return vocab_size if devices == 1 else -(-vocab_size // even) * even


@dataclass(frozen=True)
class Vocabulary:
    """What devices must tell each other of their parts, which is never a whole row of logits."""

    axis: str | None = None
    """The mesh axis over which it is split; None where one device has all of it, and nothing is told."""

    def max(self, x: Array) -> Array:
        """The highest along the last axis, f[...] of f[..., part]."""
        high = jnp.max(x, axis=-1)
        return high if self.axis is None else jax.lax.pmax(high, self.axis)

    def min(self, x: Array) -> Array:
        """The lowest along the last axis."""
        low = jnp.min(x, axis=-1)
        return low if self.axis is None else jax.lax.pmin(low, self.axis)

    def top(self, x: Array, count: int) -> tuple[Array, Array]:
        """The ``count`` highest along the last axis, or all if there are less, and i32 where they are."""
        high, own = jax.lax.top_k(x, min(count, x.shape[-1]))
        if self.axis is None:
            return high, own
        high, places = self.gather(high), self.gather(own + self.first(x.shape[-1]))
        high, chosen = jax.lax.top_k(high, min(count, high.shape[-1]))
        return high, jnp.take_along_axis(places, chosen, axis=-1)

    def length(self, x: Array) -> int:
        """Of the last axis, all parts together."""
        return x.shape[-1] if self.axis is None else x.shape[-1] * int(jax.lax.axis_size(self.axis))

    def total(self, parts: Array) -> Array:
        """The sum over the devices."""
        summed: Array = parts if self.axis is None else jax.lax.psum(parts, self.axis)
        return summed

    def gather(self, x: Array) -> Array:
        """[..., n] of each device as [..., devices * n] on all: for what is small."""
        if self.axis is None:
            return x
        gathered: Array = jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
        return gathered

    def place(self, token_ids: Array, size: int) -> Array:
        """Where tokens lie in this device's part of so many; at its end, which is out of bounds, if another has them."""
        if self.axis is None:
            return token_ids
        place = token_ids - self.first(size)
        return jnp.where((place >= 0) & (place < size), place, np.int32(size))

    def first(self, size: int) -> Array:
        """i32[], the first token, or whatever is counted, of this device's part of so many."""
        number = 0 if self.axis is None else jax.lax.axis_index(self.axis)
        return jnp.asarray(number, jnp.int32) * np.int32(size)

    def take(self, x: Array, places: Array) -> Array:
        """What is at i32[rows] places along axis 1 of [rows, devices * n, ...], of which each device has [rows, n, ...]."""
        size = x.shape[1]
        own = self.place(places, size)
        at = jnp.minimum(own, np.int32(size - 1)).reshape(-1, *(1 for _ in x.shape[1:]))
        found: Array = jnp.take_along_axis(x, at, axis=1)[:, 0]
        if self.axis is None:
            return found
        here = (own < size).reshape(-1, *(1 for _ in found.shape[1:]))
        taken: Array = self.total(jnp.where(here, found, np.zeros((), found.dtype)))
        return taken


WHOLE = Vocabulary()
"""On one device."""
