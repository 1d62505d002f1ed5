"""The norms of queries, keys and values before attention."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.norm import RMSNorm
from engine.models.spec import SelfAttentionSpec
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors


class QKVNorms(nnx.Module):
    """The RMSNorms that a SelfAttentionSpec asks for, each f[..., head_dim] or over all heads."""

    def __init__(self, spec: SelfAttentionSpec, parts: str, eps: float, kv_heads: int, make: ParameterFactory) -> None:
        head = {"head_dim": spec.head_dim}
        self.q, self.k = (
            RMSNorm(f"attention.{part}_norm", head, eps, _rule(part), make) if spec.qk_norm and part in parts else None
            for part in "qk"
        )
        every = {"kv_heads": kv_heads, "group": spec.num_heads // kv_heads + 1, **head}
        replicas = kv_heads // spec.num_kv_heads
        self.joint = JointNorm("attention.qk_norm", every, eps, make, replicas) if spec.joint_qk_norm else None
        self.qk_eps, self.v_eps = eps if spec.unit_qk_norm else None, eps if spec.value_norm else None

    def __call__(self, q: Array, k: Array | None, v: Array | None) -> tuple[Array, Array | None, Array | None]:
        """q f[..., kv_heads, group, head_dim], k and v f[..., kv_heads, head_dim] -> q by heads."""
        if self.joint is not None and k is not None:
            q, k = self.joint(q, k)
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
        q = q if self.q is None else self.q(q)
        k = k if self.k is None or k is None else self.k(k)
        if self.qk_eps is not None and k is not None:
            q, k = _of_unit_length(q, self.qk_eps), _of_unit_length(k, self.qk_eps)
        if self.v_eps is not None and v is not None:
            v = _of_unit_length(v, self.v_eps)
        return q, k, v


class JointNorm(nnx.Module):
    """RMSNorm of all query heads together, and one of all key heads (OLMo 2)."""

    def __init__(self, name: str, axes: Axes, eps: float, make: ParameterFactory, kv_replicas: int) -> None:
        self.scale = make.scale(f"{name}.scale", axes, _rule("q", "k"), kv_replicas=kv_replicas)
        self.eps, self.axis = eps, make.axis

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """q f[..., kv_heads, group, head_dim] and k f[..., kv_heads, head_dim], each like itself."""
        scale = self.scale[...]
        return self._normed(q, scale[:, :-1]), self._normed(k, scale[:, -1])

    def _normed(self, x: Array, scale: Array) -> Array:
        wide = x.astype(jnp.float32)
        mean = _mean_square(wide, tuple(range(-scale.ndim, 0)))
        if self.axis is not None:
            mean = jax.lax.pmean(mean, self.axis)
        wide = wide * jax.lax.rsqrt(mean + self.eps)
        return (wide * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


def _of_unit_length(x: Array, eps: float) -> Array:
    """An RMSNorm without scales."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(_mean_square(wide, (-1,)) + eps)).astype(x.dtype)


def _mean_square(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.mean(jnp.square(x), axis=axes, keepdims=True)


def _rule(*parts: str) -> TensorRule:
    names = (f"{LAYER}self_attn.{part}_norm.weight" for part in parts)
    return tensors(*names, along="group" if parts[1:] else None)
