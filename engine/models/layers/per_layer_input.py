"""Embeddings of tokens for each layer by itself (Gemma 3n and 4)."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.activation import Activation
from engine.models.layers.norm import RMSNorm
from engine.models.linear import linear, look_up
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, tensors


@dataclass(frozen=True)
class PerLayerInputSpec:
    """Every layer also sees ``size`` numbers of a token that are its own."""

    size: int
    activation: Activation


class PerLayerEmbedding(nnx.Module):
    """Token ids and embedded tokens to the inputs of all layers."""

    def __init__(
        self,
        spec: PerLayerInputSpec,
        layers: int,
        rows: tuple[int, int],
        hidden_size: int,
        eps: float,
        make: ParameterFactory,
    ) -> None:
        """``rows`` are those of the table, the padding included, and the padding."""
        table = tensors("model.embed_tokens_per_layer.weight")
        axes = {"vocabulary": rows[0], "per_layer": layers * spec.size}
        self.table = make.table("per_layer.embedding", axes, table, padding=rows[1])
        kernel = tensors("model.per_layer_model_projection.weight")
        out = {"layers": layers, "per_layer": spec.size}
        self.kernel = make.kernel("per_layer.kernel", {"hidden": hidden_size}, out, kernel)
        norm = tensors("model.per_layer_projection_norm.weight")
        self.norm = RMSNorm("per_layer.norm", {"per_layer": spec.size}, eps, norm, make)
        self.size, self.axis = spec.size, make.axis

    def __call__(self, token_ids: Array, x: Array, adapters: AdapterRows | None) -> Array:
        """i32[...] ids and f[..., hidden] embedded tokens -> f[..., layers, size]."""
        own = look_up(self.table, token_ids, axis=self.axis).astype(x.dtype)
        own = own.reshape(*token_ids.shape, -1, self.size) * jnp.asarray(self.size**0.5, x.dtype)
        projected = linear(x, self.kernel, None, adapters) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        return (self.norm(projected) + own) * jnp.asarray(2**-0.5, x.dtype)


class PerLayerInput(nnx.Module):
    """A layer's part: its input, gated by the residual stream, is normed and added to it."""

    def __init__(self, spec: PerLayerInputSpec, hidden_size: int, eps: float, make: ParameterFactory) -> None:
        hidden, own = {"hidden": hidden_size}, {"per_layer": spec.size}
        gate, up = tensors(f"{LAYER}per_layer_input_gate.weight"), tensors(f"{LAYER}per_layer_projection.weight")
        self.gate_kernel = make.kernel("per_layer_input.gate_kernel", hidden, own, gate)
        self.up_kernel = make.kernel("per_layer_input.up_kernel", own, hidden, up)
        stored = tensors(f"{LAYER}post_per_layer_input_norm.weight")
        self.norm = RMSNorm("per_layer_input.norm", hidden, eps, stored, make)
        self.activation = spec.activation

    def __call__(self, x: Array, own: Array, adapters: AdapterRows | None) -> Array:
        """f[..., hidden] and the layer's f[..., size] -> f[..., hidden]."""
        gated = self.activation(linear(x, self.gate_kernel, None, adapters)) * own
        return x + self.norm(linear(gated, self.up_kernel, None, adapters))


def of_layers(inputs: Array | None, start: int, count: int, period: int) -> Array | None:
    """The inputs of ``count`` layers from ``start`` on, [count / period, period, ..., size]."""
    if inputs is None:
        return None
    own = jnp.moveaxis(inputs[..., start : start + count, :], -2, 0)
    return own.reshape(count // period, period, *own.shape[1:])
