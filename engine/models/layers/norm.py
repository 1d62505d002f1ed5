"""The norms of decoders."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.layers.row_operations import XLA_ROWS, RowOperations
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import TensorRule


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), f[..., hidden], computed in float32.

    If ``centered``, the mean is subtracted first (Ba et al. 2016). ``bias`` is the rule of one that
    is added last. Without ``rule`` there are no scales. Of two axes, heads and head_dim, each head is normed by itself.
    """

    def __init__(
        self,
        name: str,
        axes: Axes,
        eps: float,
        rule: TensorRule | None,
        make: ParameterFactory,
        *,
        centered: bool = False,
        bias: TensorRule | None = None,
        kv_replicas: int = 1,
    ) -> None:
        self.scale = None if rule is None else make.scale(f"{name}.scale", axes, rule, kv_replicas=kv_replicas)
        self.bias = None if bias is None else make.bias(f"{name}.bias", axes, bias, exact=True)
        self.eps, self.centered = eps, centered

    def __call__(self, x: Array, rows: RowOperations = XLA_ROWS) -> Array:
        scale = jnp.ones(x.shape[-1:], jnp.float32) if self.scale is None else self.scale[...]
        if self.bias is None:
            return rows.normed(x, scale, self.eps, centered=self.centered)
        normed = rows.normed(x.astype(jnp.float32), scale, self.eps, centered=self.centered)
        return (normed + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class JointNorm(nnx.Module):
    """RMSNorm of all query heads together, and one of all key heads (OLMo 2)."""

    def __init__(
        self, name: str, axes: Axes, eps: float, rule: TensorRule, make: ParameterFactory, kv_replicas: int
    ) -> None:
        self.scale = make.scale(f"{name}.scale", axes, rule, kv_replicas=kv_replicas)
        self.eps, self.axis = eps, make.axis

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """q f[..., kv_heads, group, head_dim] and k f[..., kv_heads, head_dim], each like itself."""
        scale = self.scale[...]
        return self._normed(q, scale[:, :-1]), self._normed(k, scale[:, -1])

    def _normed(self, x: Array, scale: Array) -> Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=tuple(range(-scale.ndim, 0)), keepdims=True)
        if self.axis is not None:
            mean = jax.lax.pmean(mean, self.axis)
        wide = wide * jax.lax.rsqrt(mean + self.eps)
        return (wide * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)
