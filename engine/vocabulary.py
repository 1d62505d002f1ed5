"""The vocabulary of logits f32[rows, vocab], sharded over the devices in token order."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

VOCABULARY_BLOCK = 128
"""Tokens that the sampler reduces together. Each device has whole blocks, so that draws do not
depend on the number of devices."""

NO_TOKEN_LOGIT = np.float32(-3e38)
"""The logit of a padding id, which is no token."""


def padded_vocab_size(vocab_size: int, devices: int) -> int:
    """The vocabulary, padded to the same number of whole blocks on each of several devices."""
    even = devices * VOCABULARY_BLOCK
    return vocab_size if devices == 1 else -(-vocab_size // even) * even


@dataclass(frozen=True)
class Vocabulary:
    """Collectives over a sharded vocabulary. None of them moves a whole row of logits."""

    axis: str | None = None
    """The mesh axis over which it is sharded; None on one device, without communication."""

    def max(self, x: Array) -> Array:
        """The maximum along the last axis, f[...] of f[..., part]."""
        high = jnp.max(x, axis=-1)
        return high if self.axis is None else jax.lax.pmax(high, self.axis)

    def length(self, x: Array) -> int:
        """Size of the last axis over all devices."""
        return x.shape[-1] if self.axis is None else x.shape[-1] * int(jax.lax.axis_size(self.axis))

    def total(self, parts: Array) -> Array:
        """The sum over the devices."""
        summed: Array = parts if self.axis is None else jax.lax.psum(parts, self.axis)
        return summed

    def gather(self, x: Array) -> Array:
        """All-gather: [..., n] of each device as [..., devices * n] on all. For small arrays."""
        if self.axis is None:
            return x
        gathered: Array = jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
        return gathered

    def place(self, token_ids: Array, size: int) -> Array:
        """Indices of tokens in this device's shard of ``size``; ``size`` if another has them."""
        if self.axis is None:
            return token_ids
        place = token_ids - self.first(size)
        return jnp.where((place >= 0) & (place < size), place, np.int32(size))

    def first(self, size: int) -> Array:
        """i32[], the first index of this device's shard of ``size``."""
        number = 0 if self.axis is None else jax.lax.axis_index(self.axis)
        return jnp.asarray(number, jnp.int32) * np.int32(size)

    def take(self, x: Array, places: Array) -> Array:
        """x[row, places[row]] of x [rows, devices * n, ...], sharded as [rows, n, ...]."""
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
"""The vocabulary of one device."""
