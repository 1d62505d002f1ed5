"""What a feed-forward has between its products."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Activation(Enum):
    """The gate's activation."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    RELU = auto()
    RELU_SQUARED = auto()

    def __call__(self, x: Array) -> Array:
        """Elementwise."""
        if self is Activation.SILU:
            return jax.nn.silu(x)
        if self is Activation.RELU:
            return jax.nn.relu(x)
        if self is Activation.RELU_SQUARED:
            return jnp.square(jax.nn.relu(x))
        return jax.nn.gelu(x, approximate=self is Activation.GELU_TANH)

    def gated(self, gate: Array, up: Array) -> Array:
        """Elementwise."""
        return self(gate) * up


@dataclass(frozen=True)
class ClampedGate:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped gate and up (gpt-oss)."""

    alpha: float
    limit: float

    def gated(self, gate: Array, up: Array) -> Array:
        """Elementwise, float32."""
        limit = np.float32(self.limit)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + np.float32(1)) * gate * jax.nn.sigmoid(gate * np.float32(self.alpha))


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.RELU_SQUARED,
    }
)
"""By the names of config.json."""
