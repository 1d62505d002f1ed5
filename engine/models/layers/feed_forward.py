"""The gated feed-forward. Another kind is another module with a spec and its nnx.Module."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.layers.activation import Activation
from engine.models.layers.row_operations import scaled
from engine.models.linear import linear
from engine.models.step_context import StepContext
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors


@dataclass(frozen=True)
class GatedSpec:
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020), a FeedForwardSpec."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    """Else it is ``down(activation(up(x)))`` (Nemotron-H)."""
    xielu: bool = False
    """The activation, which has no gate then, is xIELU, with numbers of the layer's own (Apertus)."""
    gate_scale: float = 1.0
    """The gate is multiplied by it (Falcon-H1)."""

    def indivisible(self, devices: int) -> str | None:
        """See FeedForwardSpec."""
        return f"the {self.intermediate_size} columns of the feed-forward" if self.intermediate_size % devices else None

    def scratch(self, hidden_size: int, devices: int) -> int:  # noqa: ARG002
        """See FeedForwardSpec."""
        return 4 * self.intermediate_size // devices

    def build(self, hidden_size: int, make: ParameterFactory) -> "GatedMLP":
        """See FeedForwardSpec."""
        return GatedMLP(self, hidden_size, make)


def plain_rules(up: str, down: str, *, bias: bool, layer: str = LAYER) -> dict[str, TensorRule]:
    """The rules of a feed-forward without a gate, by the names of its products in a layer's ``mlp``."""
    kinds = {"kernel": "weight", "bias": "bias"} if bias else {"kernel": "weight"}
    return {
        f"mlp.{name}_{kind}": tensors(f"{layer}mlp.{stored}.{suffix}")
        for name, stored in (("gate_up", up), ("down", down))
        for kind, suffix in kinds.items()
    }


class XIELU(nnx.Module):
    """An activation of which each layer has learned both sides (Huang and Schlag 2024)."""

    LARGEST = -1e-6
    """Of the negative side's exponents."""

    def __init__(self, make: ParameterFactory, name: str, prefix: str) -> None:
        def number(kind: str, stored: str | None = None) -> nnx.Param[Array]:
            rule = tensors(f"{LAYER}{prefix}.act_fn.{kind}", stored=stored)
            return make.scale(f"{name}.xielu.{kind}", {"hidden": 1}, rule)

        self.alpha_p, self.alpha_n, self.beta = number("alpha_p"), number("alpha_n"), number("beta", stored="")

    def __call__(self, x: Array) -> Array:
        """Elementwise, in float32; the result has x's dtype."""
        wide, each = x.astype(jnp.float32), (1,) * x.ndim
        beta = self.beta[...].reshape(each)
        positive = jax.nn.softplus(self.alpha_p[...]).reshape(each) * jnp.square(wide)
        below = jnp.expm1(jnp.minimum(wide, np.float32(self.LARGEST))) - wide
        negative = (beta + jax.nn.softplus(self.alpha_n[...]).reshape(each)) * below
        return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)


class GatedMLP(nnx.Module):
    """Gate and up are one kernel f[hidden, 2, ffn], split on its last axis; f[hidden, 1, ffn] of
    up alone.

    ``name`` begins the names of its parameters, ``prefix`` those of its tensors in a layer.
    """

    def __init__(
        self, spec: GatedSpec, hidden_size: int, make: ParameterFactory, name: str = "mlp", prefix: str = "mlp"
    ) -> None:
        hidden, ffn = {"hidden": hidden_size}, {"ffn": spec.intermediate_size}
        gate_up, parts = {"gate_up": 1 + spec.gated, **ffn}, ("gate", "up")[not spec.gated :]

        def stored(kind: str, *names: str) -> TensorRule:
            rule = (f"{LAYER}{prefix}.{name}_proj.{kind}" for name in names)
            return tensors(*rule, along="gate_up" if names[1:] else None)

        def bias(place: str, axes: Axes, rule: TensorRule) -> nnx.Param[Array] | None:
            return make.bias(f"{name}.{place}_bias", axes, rule) if spec.bias else None

        self.gate_up_kernel = make.kernel(f"{name}.gate_up_kernel", hidden, gate_up, stored("weight", *parts))
        self.gate_up_bias = bias("gate_up", gate_up, stored("bias", *parts))
        self.down_kernel = make.kernel(f"{name}.down_kernel", ffn, hidden, stored("weight", "down"), last=True)
        self.down_bias = bias("down", hidden, stored("bias", "down"))
        self.activation, self.gated, self.axis = spec.activation, spec.gated, make.axis
        self.gate_scale = spec.gate_scale
        self.xielu = XIELU(make, name, prefix) if spec.xielu else None

    def __call__(self, x: Array, step: StepContext) -> Array:
        return linear(self._activated(x, step), self.down_kernel, self.down_bias, step.adapters, self.axis)

    def part(self, x: Array, step: StepContext) -> Array:
        """f[..., hidden] -> f[..., hidden], this device's part of the sum, without the bias."""
        return linear(self._activated(x, step), self.down_kernel, None, step.adapters)

    def _activated(self, x: Array, step: StepContext) -> Array:
        gate_up = linear(x, self.gate_up_kernel, self.gate_up_bias, step.adapters)
        if self.xielu is not None:
            return self.xielu(gate_up[..., 0, :])
        if not self.gated:
            return self.activation(gate_up[..., 0, :])
        if self.gate_scale != 1.0:
            gate_up = scaled(
                gate_up, np.array([self.gate_scale, 1.0], np.float32).reshape((1,) * (x.ndim - 1) + (2, 1))
            )
        return step.rows.gated(gate_up, self.activation)
