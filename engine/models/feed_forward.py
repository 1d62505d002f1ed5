"""The gated feed-forward. Another kind would be another module with a spec and its nnx.Module."""

from dataclasses import dataclass
from enum import Enum

import jax
from flax import nnx
from jax import Array

from engine.models.linear import linear
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors


class Activation(Enum):
    """The gate's activation."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"

    def __call__(self, x: Array) -> Array:
        """Elementwise."""
        return jax.nn.silu(x) if self is Activation.SILU else jax.nn.gelu(x, approximate=True)


@dataclass(frozen=True)
class GatedSpec:
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020), a FeedForwardSpec."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU

    @property
    def width(self) -> int:
        """See FeedForwardSpec."""
        return self.intermediate_size

    def build(self, hidden_size: int, make: ParameterFactory) -> "GatedMLP":
        """See FeedForwardSpec."""
        return GatedMLP(self, hidden_size, make)


class GatedMLP(nnx.Module):
    """Gate and up are one kernel f[hidden, 2, ffn], split on its last axis."""

    def __init__(self, spec: GatedSpec, hidden_size: int, make: ParameterFactory) -> None:
        hidden, ffn = {"hidden": hidden_size}, {"ffn": spec.intermediate_size}
        gate_up = {"gate_up": 2, **ffn}

        def stored(kind: str, *names: str) -> TensorRule:
            return tensors(
                *(f"{LAYER}mlp.{name}_proj.{kind}" for name in names), along="gate_up" if names[1:] else None
            )

        self.gate_up_kernel = make.kernel("mlp.gate_up_kernel", hidden, gate_up, stored("weight", "gate", "up"))
        self.gate_up_bias = make.bias("mlp.gate_up_bias", gate_up, stored("bias", "gate", "up")) if spec.bias else None
        self.down_kernel = make.kernel("mlp.down_kernel", ffn, hidden, stored("weight", "down"), last=True)
        self.down_bias = make.bias("mlp.down_bias", hidden, stored("bias", "down")) if spec.bias else None
        self.activation, self.axis = spec.activation, make.axis

    def __call__(self, x: Array) -> Array:
        gate_up = linear(x, self.gate_up_kernel, self.gate_up_bias)
        activated = self.activation(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return linear(activated, self.down_kernel, self.down_bias, self.axis)
