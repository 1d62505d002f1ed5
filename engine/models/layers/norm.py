"""The norms of decoders."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import TensorRule


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), f[..., hidden], computed in float32.

    If ``centered``, the mean is subtracted first (Ba et al. 2016).
    """

    def __init__(
        self, name: str, axes: Axes, eps: float, rule: TensorRule, make: ParameterFactory, *, centered: bool = False
    ) -> None:
        self.scale = make.scale(f"{name}.scale", axes, rule)
        self.eps, self.centered = eps, centered

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        if self.centered:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * self.factor(wide)
        # Scales stay float32: else XLA would convert all scales of a stack before each scan.
        return (wide * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)

    def factor(self, wide: Array) -> Array:
        """f32[..., hidden] -> f32[..., 1], what each row is multiplied by beside the scales."""
        return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
