"""The norm of all decoders that are served."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import TensorRule


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 whatever x is."""

    def __init__(self, name: str, axes: Axes, eps: float, rule: TensorRule, make: ParameterFactory) -> None:
        self.scale = make.scale(f"{name}.scale", axes, rule)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # Scaled in float32 too: a stack of scales that had to be rounded would be, all of it, before every loop.
        return (wide * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
