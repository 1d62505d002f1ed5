"""The one decoder that oDriver serves; families differ only in their ModelSpec.

The decoder does not depend on pages. A block's mixer gets its cache and the StepContext, whose
attention returns the updated cache and the result: paged attention in service, plain causal
attention in training. Leading axes are free: i32[T] in service, i32[batch, length] in
training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.devices.mesh import TP
from engine.models.adapters import split_residual
from engine.models.adapters.adapted import AdapterRows
from engine.models.adapters.adapted_experts import AdaptedExperts
from engine.models.adapters.adapted_table import AdaptedTable
from engine.models.adapters.split_models import splits_residual
from engine.models.layers.cache_layout import CacheLayout, cache_layout
from engine.models.layers.feed_forward import GatedMLP
from engine.models.layers.norm import RMSNorm
from engine.models.layers.per_layer_input import PerLayerEmbedding, PerLayerInput, of_layers
from engine.models.layers.row_operations import RowOperations
from engine.models.layers.self_attention import SelfAttention
from engine.models.linear import look_up, table_logits, zero_behind
from engine.models.partition import Partition
from engine.models.rope import Rotation, rotations
from engine.models.spec import BlockSpec, LayerGroup, ModelSpec, layer_plan, single_layers
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory, declared
from engine.models.weights.forms import Experts, InStack, Weight
from engine.models.weights.parameters import LAYER, Role, tensors
from engine.models.weights.weight_format import Layout
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


class DecoderLayer(nnx.Module):
    """A mixer, a feed-forward or both, each between its norms and added to the residual stream."""

    def __init__(self, spec: BlockSpec, partition: Partition, make: ParameterFactory) -> None:
        model, norms = partition.model, spec.norms

        def norm(name: str, stored: str, wanted: bool) -> RMSNorm | None:
            return _stream_norm(name, f"{LAYER}{stored}", model, make) if wanted else None

        self.attention_norm = norm("attention_norm", "input_layernorm", norms.before and spec.mixer is not None)
        self.mixer = None if spec.mixer is None else spec.mixer.build(partition, make)
        self.attention_post_norm = norm(
            "attention_post_norm", "post_attention_layernorm", norms.after and spec.mixer is not None
        )
        mlp_norm = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        norms = spec.feed_forward_norms or norms
        feed = spec.feed_forward
        self.mlp_norm = norm("mlp_norm", mlp_norm, norms.before and not spec.is_parallel and feed is not None)
        self.mlp = None if feed is None else feed.build(model.hidden_size, make)
        self.mlp_post_norm = norm("mlp_post_norm", "post_feedforward_layernorm", norms.after and feed is not None)
        self.is_parallel = spec.is_parallel
        self.residual_scale, per_layer = spec.residual_scale, model.per_layer_inputs
        self.per_layer_input = (
            PerLayerInput(per_layer, model.hidden_size, model.rms_norm_eps, make) if per_layer else None
        )
        scale = tensors(f"{LAYER}layer_scalar")
        self.output_scale = make.scale("output_scale", {"hidden": 1}, scale) if spec.output_scale else None

    def __call__(
        self, x: Array, cache: LayerCache, place: Place, step: StepContext, own: Array | None = None
    ) -> tuple[LayerCache, Array]:
        """``own`` is the layer's own input f[..., size], if the model has such."""
        if step.adapters is not None and step.adapters.axis is not None:
            return self._on_parts(x, cache, place, step, step.adapters)
        rows, scale = step.rows, self.residual_scale
        normed = _normed(x, self.attention_norm, rows)
        if self.mixer is not None:
            cache, mixed = self.mixer(normed, cache, place, step)
            x = rows.added(x, _normed(mixed, self.attention_post_norm, rows), scale)
        if self.mlp is not None:
            fed = self.mlp(normed if self.is_parallel else _normed(x, self.mlp_norm, rows), step)
            x = rows.added(x, _normed(fed, self.mlp_post_norm, rows), scale)
        if self.per_layer_input is not None and own is not None:
            x = self.per_layer_input(x, own, step.adapters)
        if self.output_scale is not None:
            x = x * self.output_scale[...].astype(x.dtype).reshape((1,) * x.ndim)
        return cache, x

    def _on_parts(
        self, x: Array, cache: LayerCache, place: Place, step: StepContext, rows: AdapterRows
    ) -> tuple[LayerCache, Array]:
        """The call of a plain block, where each device has its part f[T, part] of the residual stream."""
        assert isinstance(self.mixer, SelfAttention) and self.attention_norm is not None
        assert isinstance(self.mlp, GatedMLP) and self.mlp_norm is not None
        normed, adapters = split_residual.normed(x, self.attention_norm, self.mixer.qkv_kernel.get_value(), rows)
        cache, mixed = self.mixer(normed, cache, place, replace(step, adapters=adapters))
        x = step.rows.added(x, mixed, self.residual_scale)
        normed, adapters = split_residual.normed(x, self.mlp_norm, self.mlp.gate_up_kernel.get_value(), rows)
        return cache, step.rows.added(x, self.mlp(normed, replace(step, adapters=adapters)), self.residual_scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Taps:
    """The residual stream before some layers, for what reads it beside the decoder."""

    taken: Array
    """f[len(layers) + 1, ..., hidden]; the last one is of the other layers. Empty without layers."""
    layers: tuple[int, ...] = field(metadata={"static": True})

    def before(self, layer: Array | int, x: Array) -> "Taps":
        """With f[..., hidden] before this layer, if it is one of them."""
        if not self.layers:
            return self
        place = jnp.int32(len(self.layers))
        for number, tapped in enumerate(self.layers):
            place = jnp.where(jnp.equal(layer, tapped), jnp.int32(number), place)
        return replace(self, taken=jax.lax.dynamic_update_index_in_dim(self.taken, x, place, 0))


class LayerStack(nnx.Module):
    """Layers in repeats of a period of blocks, which ``lax.scan`` runs and XLA compiles once.

    Each parameter of a block is one array [repeats, ...]. All repeats begin with equal numbers: a
    stack can be loaded, but not trained.
    """

    def __init__(self, group: LayerGroup, partition: Partition, make: ParameterFactory) -> None:
        self.blocks: nnx.List[DecoderLayer] = nnx.List([DecoderLayer(spec, partition, make) for spec in group.period])
        state = nnx.state(self.blocks)
        stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (group.repeats, *leaf.shape)), state)
        nnx.update(self.blocks, stacked)
        self.repeats = group.repeats

    def __call__(
        self,
        x: Array,
        caches: list[LayerCache],
        layers: tuple[CacheLayout, int],
        step: StepContext,
        own: Array | None,
        taps: Taps,
    ) -> tuple[list[LayerCache], Array, Taps]:
        """``layers`` are where all layers find their caches, and the first one here; ``own`` is
        f[repeats, period, ..., size]."""
        layout, start = layers
        places = layout.places[start : start + self.repeats * len(self.blocks)]
        arrays = [layout.array(place, stacked=True) for place in places[: len(self.blocks)]]
        graph, *states = nnx.split(self.blocks, _is_read_in_place, ...)
        stacks, weights = states

        def repeat(
            carry: tuple[list[LayerCache], Array, Taps], each: tuple[Any, Array, Array, Any]
        ) -> tuple[tuple[list[LayerCache], Array, Taps], None]:
            (caches, x, taps), (weights, index, places, own) = carry, each
            caches = list(caches)
            experts = jax.tree.map(partial(InStack, place=index), stacks, is_leaf=_is_form)
            blocks: nnx.List[DecoderLayer] = nnx.merge(graph, experts, weights)
            for number, block in enumerate(blocks):
                place = Place(places[number, 0] if in_groups else 0, places[number, 1])
                array, inputs = arrays[number], None if own is None else own[number]
                taps = taps.before(start + index * np.int32(len(self.blocks)) + number, x)
                caches[array], x = block(x, caches[array], place, step, inputs)
            return (caches, x, taps), None

        in_groups = any(place.group for place in places)
        by_repeat = jnp.array([place[:2] for place in places], jnp.int32).reshape(self.repeats, len(self.blocks), 2)
        indices = jnp.arange(self.repeats, dtype=jnp.int32)
        return jax.lax.scan(repeat, (caches, x, taps), (weights, indices, by_repeat, own))[0]


class Decoder(nnx.Module):
    """Token ids to the last hidden state, and hidden states to logits."""

    def __init__(self, partition: Partition, rngs: nnx.Rngs | None = None, *, scans: bool = False) -> None:
        """Random weights to train, or without ``rngs`` zeros, for their shapes."""
        model = partition.model
        make = ParameterFactory(rngs, partition.devices, model.num_layers, dict(model.tensors))
        axes = {"vocabulary": partition.padded_vocab_size, "hidden": model.hidden_size}
        padding = partition.padded_vocab_size - model.vocab_size
        self.embedding = make.table("embedding", axes, tensors("model.embed_tokens.weight"), padding=padding)
        self.layers: nnx.List[DecoderLayer | LayerStack] = nnx.List(
            [LayerStack(group, partition, make) for group in layer_plan(model.blocks)]
            if scans
            else [DecoderLayer(block, partition, make) for block in model.blocks]
        )
        eps, rows, per_layer = model.rms_norm_eps, (partition.padded_vocab_size, padding), model.per_layer_inputs
        self.per_layer_embedding = (
            PerLayerEmbedding(per_layer, model.num_layers, rows, model.hidden_size, eps, make) if per_layer else None
        )
        self.norm = _stream_norm("norm", "model.norm", model, make)
        self.lm_head = (
            None if model.tied_embeddings else make.table("lm_head", axes, tensors("lm_head.weight"), padding=padding)
        )
        self.partition = partition
        make.require_all_rules_used()

    def __call__(
        self, token_ids: Array, caches: Sequence[LayerCache], step: StepContext
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids, a cache for each layer of a page, or one for all, and then for each state
        or all of them -> caches, f[..., hidden]."""
        written, hidden, _ = self.tapped(token_ids, caches, step, ())
        return written, hidden

    def tapped(
        self, token_ids: Array, caches: Sequence[LayerCache], step: StepContext, layers: tuple[int, ...]
    ) -> tuple[list[LayerCache], Array, Array]:
        """As a call, and f[layers, ..., hidden] the residual stream before these layers."""
        x = look_up(self.embedding, token_ids, step.adapters, self.partition.axis)
        if step.num_tokens is not None:
            x = zero_behind(x, step.num_tokens, self.embedding.get_value())
        if self.partition.model.embedding_multiplier is not None:
            x = x * jnp.asarray(self.partition.model.embedding_multiplier, x.dtype)
        own = None if self.per_layer_embedding is None else self.per_layer_embedding(token_ids, x, step.adapters)
        axis = self.partition.axis if step.adapters is not None and splits_residual(self.partition) else None
        if step.adapters is not None and axis is not None:
            step, x = replace(step, adapters=replace(step.adapters, axis=axis)), split_residual.own_part(x, axis)
        written, blocks = list(caches), self.partition.model.blocks
        groups = layer_plan(blocks) if isinstance(self.layers[0], LayerStack) else single_layers(blocks)
        start, layout = 0, cache_layout(blocks, keeps_all=self.partition.model.keeps_all)
        taps = Taps(jnp.zeros((len(layers) + bool(layers), *x.shape), x.dtype), layers)
        for layer, group in zip(self.layers, groups, strict=True):
            inputs = of_layers(own, start, group.num_layers, len(group.period))
            if isinstance(layer, LayerStack):
                written, x, taps = layer(x, written, (layout, start), step, inputs, taps)
            else:
                place, first = layout.places[start], None if inputs is None else inputs[0, 0]
                array, taps = layout.array(place, stacked=False), taps.before(start, x)
                written[array], x = layer(x, written[array], Place(place.group, None), step, first)
            start += group.num_layers
        taken = taps.taken[: len(layers)]
        if axis is not None:
            x, taken = split_residual.whole(x, axis), split_residual.whole(taken, axis)
        return written, self.norm(x, step.rows), taken

    def rotations(self, positions: Array, longest: int | None = None) -> tuple[Rotation, ...]:
        """Those of the model's ropes; see ``rope.rotations``."""
        return rotations(self.partition.model, positions, longest)

    @property
    def head(self) -> Weight:
        """The table [vocab, hidden] for logits."""
        return (self.embedding if self.lm_head is None else self.lm_head).get_value()

    def logits(self, hidden: Array, adapters: AdapterRows | None = None) -> Array:
        """f[..., hidden] -> f32[..., vocab], on each device its part of the padded vocabulary.

        ``adapters`` are those of these rows.
        """
        return logits(hidden, self.head, self.partition, adapters)


def logits(
    hidden: Array, head: Weight | AdaptedTable, partition: Partition, adapters: AdapterRows | None = None
) -> Array:
    """f[..., hidden] -> f32[..., part of the vocabulary]; padding is below all tokens."""
    found, cap = table_logits(hidden, head, adapters), partition.model.logit_soft_cap
    if partition.model.logit_scale != 1.0:
        found = found * np.float32(partition.model.logit_scale)
    if cap is not None:
        found = np.float32(cap) * jnp.tanh(found / np.float32(cap))
    return without_padding(found, partition.model.vocab_size, partition.padded_vocab_size)


def without_padding(logits: Array, num_tokens: int, padded: int) -> Array:
    """f32[..., part] of ``padded`` columns, those behind the first ``num_tokens`` below all others."""
    if padded == num_tokens:
        return logits
    count = logits.shape[-1]
    ids = Vocabulary(TP).first(count) + jnp.arange(count, dtype=jnp.int32)
    is_token = (ids < num_tokens).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(is_token, logits, NO_TOKEN_LOGIT)


def _is_read_in_place(path: object, variable: nnx.Variable[Any]) -> bool:  # noqa: ARG001
    """Whether a stack is for products that find a layer's part of it: ``scan`` would copy that."""
    if declared(variable).role is not Role.EXPERTS:
        return False
    value = variable.get_value()
    form = value.base if isinstance(value, AdaptedExperts) else value
    return isinstance(form, Experts) and form.layout is Layout.MATRIX


def _is_form(leaf: object) -> bool:
    return isinstance(leaf, Experts)


def _stream_norm(name: str, stored: str, model: ModelSpec, make: ParameterFactory) -> RMSNorm:
    """A norm of the residual stream, or of what is added to it; ``stored`` begins the names of its tensors."""
    hidden, rule = {"hidden": model.hidden_size}, tensors(f"{stored}.weight")
    bias = tensors(f"{stored}.bias") if model.norm_bias else None
    return RMSNorm(name, hidden, model.rms_norm_eps, rule, make, centered=model.centered_norms, bias=bias)


def _normed(x: Array, norm: RMSNorm | None, rows: RowOperations) -> Array:
    return x if norm is None else norm(x, rows)
