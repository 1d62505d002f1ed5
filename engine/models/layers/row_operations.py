"""What a decoder computes between its products, each row by itself: by XLA, or by a backend's kernels."""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.models.layers.activation import Activation


class RowOperations(Protocol):
    """Hashable; results have the dtype of the first argument."""

    def normed(self, x: Array, scale: Array, eps: float, *, centered: bool) -> Array:
        """The norm f[..., hidden] of rows, by f32[hidden] scales; see RMSNorm.

        XLA's has f32[heads, head_dim] for f[..., heads, head_dim], too.
        """

    def gated(self, gate_up: Array, activation: Activation) -> Array:
        """f[..., 2, n] of gate and up -> f[..., n]."""

    def added(self, x: Array, y: Array, scale: float) -> Array:
        """x + scale * y, of two f[..., hidden]."""


class XLARows:
    """XLA's operations, which fuse with what is beside them."""

    def normed(self, x: Array, scale: Array, eps: float, *, centered: bool) -> Array:
        """See RowOperations."""
        wide = x.astype(jnp.float32)
        if centered:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * norm_factor(wide, eps)
        # Scales stay float32: else XLA would convert all scales of a stack before each scan.
        return (wide * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)

    def gated(self, gate_up: Array, activation: Activation) -> Array:
        """See RowOperations."""
        return activation.gated(gate_up[..., 0, :], gate_up[..., 1, :])

    def added(self, x: Array, y: Array, scale: float) -> Array:
        """See RowOperations."""
        return x + scaled(y, scale)


XLA_ROWS = XLARows()


def scaled(x: Array, factor: float | NDArray[np.float32]) -> Array:
    """x by a factor, or by those of an array of as many axes, in float32; the result has x's dtype."""
    if isinstance(factor, float) and factor == 1.0:
        return x
    return (x.astype(jnp.float32) * np.float32(factor)).astype(x.dtype)


def norm_factor(wide: Array, eps: float) -> Array:
    """f32[..., hidden] -> f32[..., 1], what a norm multiplies each row by beside the scales."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
