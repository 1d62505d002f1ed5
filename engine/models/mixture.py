"""Mixtral's mixture of gated feed-forwards, computed densely: every expert sees every token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.linear import linear
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, tensors

MOE = f"{LAYER}block_sparse_moe."
EXPERT = f"{MOE}experts.{{experts}}."


@dataclass(frozen=True)
class MixtureSpec:
    """The sum of the likeliest experts, weighted by their renormalised probabilities.

    Jiang et al. 2024. A FeedForwardSpec.
    """

    intermediate_size: int
    """The columns of one expert."""
    num_experts: int
    experts_per_token: int

    @property
    def width(self) -> int:
        """See FeedForwardSpec."""
        return self.num_experts * self.intermediate_size

    def build(self, hidden_size: int, make: ParameterFactory) -> "MixtureMLP":
        """See FeedForwardSpec."""
        return MixtureMLP(self, hidden_size, make)


class MixtureMLP(nnx.Module):
    """Kernels: gate and up f[hidden, experts, 2, ffn], down f[ffn * experts, hidden]."""

    def __init__(self, spec: MixtureSpec, hidden_size: int, make: ParameterFactory) -> None:
        hidden, ffn, experts = {"hidden": hidden_size}, {"ffn": spec.intermediate_size}, {"experts": spec.num_experts}
        gate_up = tensors(f"{EXPERT}w1.weight", f"{EXPERT}w3.weight", along="gate_up")
        down = tensors(f"{EXPERT}w2.weight")
        self.router_kernel = make.kernel("mlp.router_kernel", hidden, experts, tensors(f"{MOE}gate.weight"))
        self.gate_up_kernel = make.kernel("mlp.gate_up_kernel", hidden, {**experts, "gate_up": 2, **ffn}, gate_up)
        self.down_kernel = make.kernel("mlp.down_kernel", {**ffn, **experts}, hidden, down, last=True)
        self.experts_per_token, self.axis = spec.experts_per_token, make.axis

    def __call__(self, x: Array) -> Array:
        gate_up = linear(x, self.gate_up_kernel, None)
        activated = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        weighted = activated * self._weights(x)[..., None].astype(x.dtype)
        by_column = jnp.swapaxes(weighted, -1, -2)
        return linear(by_column.reshape(*x.shape[:-1], -1), self.down_kernel, None, self.axis)

    def _weights(self, x: Array) -> Array:
        """f32[..., experts], zero for those that are not among the likeliest."""
        probabilities = jax.nn.softmax(linear(x, self.router_kernel, None).astype(jnp.float32), axis=-1)
        values, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
        values /= values.sum(axis=-1, keepdims=True)
        of_each = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=jnp.float32)
        return (values[..., None] * of_each).sum(axis=-2)
