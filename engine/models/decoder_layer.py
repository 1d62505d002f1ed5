"""One layer of a decoder: its mixers and its feed-forward around the residual stream."""

from collections.abc import Sequence
from dataclasses import replace

from flax import nnx
from jax import Array

from engine.models.adapters import split_residual
from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.feed_forward import GatedMLP
from engine.models.layers.norm import RMSNorm
from engine.models.layers.per_layer_input import PerLayerInput
from engine.models.layers.row_operations import RowOperations, scaled
from engine.models.layers.self_attention import SelfAttention
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, tensors

Places = Sequence[tuple[int, Place]]
"""For each mixer of a layer, which of the caches it has, and where in that."""


class DecoderLayer(nnx.Module):
    """Mixers, a feed-forward or both, each between its norms and added to the residual stream."""

    def __init__(self, spec: BlockSpec, partition: Partition, make: ParameterFactory) -> None:
        model, norms = partition.model, spec.norms

        def norm(name: str, stored: str, wanted: bool) -> RMSNorm | None:
            return stream_norm(name, f"{LAYER}{stored}", model, make) if wanted else None

        self.attention_norm = norm("attention_norm", "input_layernorm", norms.before and spec.mixer is not None)
        self.mixer = None if spec.mixer is None else spec.mixer.build(partition, make)
        self.beside = None if spec.beside is None else spec.beside.build(partition, make)
        self.attention_post_norm = norm(
            "attention_post_norm", "post_attention_layernorm", norms.after and spec.mixer is not None
        )
        mlp_norm = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        norms = spec.feed_forward_norms or norms
        feed, has_own = spec.feed_forward, spec.parallel_norm or not spec.is_parallel
        self.mlp_norm = norm("mlp_norm", mlp_norm, norms.before and feed is not None and has_own)
        self.mlp = None if feed is None else feed.build(model.hidden_size, make)
        self.mlp_post_norm = norm("mlp_post_norm", "post_feedforward_layernorm", norms.after and feed is not None)
        self.is_parallel, self.multipliers = spec.is_parallel, spec.multipliers
        self.residual_scale, per_layer = spec.residual_scale, model.per_layer_inputs
        self.per_layer_input = (
            PerLayerInput(per_layer, model.hidden_size, model.rms_norm_eps, make) if per_layer else None
        )
        scale = tensors(f"{LAYER}layer_scalar")
        self.output_scale = make.scale("output_scale", {"hidden": 1}, scale) if spec.output_scale else None

    def __call__(
        self, x: Array, caches: Sequence[LayerCache], places: Places, step: StepContext, own: Array | None = None
    ) -> tuple[list[LayerCache], Array]:
        """``own`` is the layer's own input f[..., size], if the model has such."""
        if step.adapters is not None and step.adapters.axis is not None:
            return self._on_parts(x, caches, places, step, step.adapters)
        rows, scale = step.rows, self.residual_scale
        written, given, normed = list(caches), x, _normed(x, self.attention_norm, rows)
        if self.mixer is not None:
            written, mixed = self._mixed(normed, written, places, step)
            x = rows.added(x, _normed(mixed, self.attention_post_norm, rows), scale)
        if self.mlp is not None:
            shares = self.is_parallel and self.mlp_norm is None
            seen = normed if shares else _normed(given if self.is_parallel else x, self.mlp_norm, rows)
            fed = self.mlp(seen, step)
            fed = scaled(fed, self.multipliers.feed_forward_output)
            x = rows.added(x, _normed(fed, self.mlp_post_norm, rows), scale)
        if self.per_layer_input is not None and own is not None:
            x = self.per_layer_input(x, own, step.adapters)
        if self.output_scale is not None:
            x = x * self.output_scale[...].astype(x.dtype).reshape((1,) * x.ndim)
        return written, x

    def _mixed(
        self, x: Array, caches: list[LayerCache], places: Places, step: StepContext
    ) -> tuple[list[LayerCache], Array]:
        """What the mixers give for f[..., hidden], together."""
        assert self.mixer is not None
        by, (array, place) = self.multipliers, places[0]
        caches[array], mixed = self.mixer(scaled(x, by.mixer_input), caches[array], place, step)
        mixed = scaled(mixed, by.mixer_output)
        if self.beside is not None:
            array, place = places[1]
            caches[array], other = self.beside(scaled(x, by.beside_input), caches[array], place, step)
            mixed = mixed + scaled(other, by.beside_output)
        return caches, mixed

    def _on_parts(
        self, x: Array, caches: Sequence[LayerCache], places: Places, step: StepContext, rows: AdapterRows
    ) -> tuple[list[LayerCache], Array]:
        """The call of a plain block, where each device has its part f[T, part] of the residual stream."""
        assert isinstance(self.mixer, SelfAttention) and self.attention_norm is not None
        assert isinstance(self.mlp, GatedMLP) and self.mlp_norm is not None
        normed, adapters = split_residual.normed(x, self.attention_norm, self.mixer.qkv_kernel.get_value(), rows)
        written, mixed = self._mixed(normed, list(caches), places, replace(step, adapters=adapters))
        x = step.rows.added(x, mixed, self.residual_scale)
        normed, adapters = split_residual.normed(x, self.mlp_norm, self.mlp.gate_up_kernel.get_value(), rows)
        return written, step.rows.added(x, self.mlp(normed, replace(step, adapters=adapters)), self.residual_scale)


def stream_norm(name: str, stored: str, model: ModelSpec, make: ParameterFactory) -> RMSNorm:
    """A norm of the residual stream, or of what is added to it; ``stored`` begins the names of its tensors."""
    hidden, rule = {"hidden": model.hidden_size}, tensors(f"{stored}.weight") if model.norm_scales else None
    bias = tensors(f"{stored}.bias") if model.norm_bias else None
    return RMSNorm(name, hidden, model.rms_norm_eps, rule, make, centered=model.centered_norms, bias=bias)


def _normed(x: Array, norm: RMSNorm | None, rows: RowOperations) -> Array:
    return x if norm is None else norm(x, rows)
