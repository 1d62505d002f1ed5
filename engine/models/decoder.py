"""The one decoder that oDriver serves; families differ only in their ModelSpec.

The decoder does not depend on pages. A block's mixer gets its cache and the StepContext, whose
attention returns the updated cache and the result: paged attention in service, plain causal
attention in training. Leading axes are free: i32[T] in service, i32[batch, length] in
training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
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
from engine.models.decoder_layer import DecoderLayer, stream_norm
from engine.models.layers.cache_layout import CacheLayout, cache_layout
from engine.models.layers.per_layer_input import PerLayerEmbedding, of_layers
from engine.models.linear import look_up, table_logits, zero_behind
from engine.models.partition import Partition
from engine.models.rope import Rotation, rotations
from engine.models.spec import LayerGroup, layer_plan, single_layers
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory, declared
from engine.models.weights.forms import Experts, InStack, Weight
from engine.models.weights.parameters import Role, tensors
from engine.models.weights.weight_format import Layout
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


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
        numbers = count()
        arrays = [
            [(layout.array(place, stacked=True), next(numbers)) for place in each]
            for each in places[: len(self.blocks)]
        ]
        graph, *states = nnx.split(self.blocks, _is_read_in_place, ...)
        stacks, weights = states

        def repeat(
            carry: tuple[list[LayerCache], Array, Taps], each: tuple[Any, Array, Array, Any]
        ) -> tuple[tuple[list[LayerCache], Array, Taps], None]:
            (caches, x, taps), (weights, index, places, own) = carry, each
            experts = jax.tree.map(partial(InStack, place=index), stacks, is_leaf=_is_form)
            blocks: nnx.List[DecoderLayer] = nnx.merge(graph, experts, weights)
            for number, block in enumerate(blocks):
                found = [
                    (array, Place(places[at, 0] if in_groups else 0, places[at, 1])) for array, at in arrays[number]
                ]
                inputs = None if own is None else own[number]
                taps = taps.before(start + index * np.int32(len(self.blocks)) + number, x)
                caches, x = block(x, caches, found, step, inputs)
            return (caches, x, taps), None

        every = [place for each in places for place in each]
        in_groups = any(place.group for place in every)
        by_repeat = jnp.array([place[:2] for place in every], jnp.int32).reshape(self.repeats, sum(map(len, arrays)), 2)
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
        places = {"positions": model.position_rows, "hidden": model.hidden_size}
        rule = tensors("model.embed_positions.weight", stored="positions hidden")
        self.position_table = make.array("position_table", places, rule) if model.position_rows else None
        self.layers: nnx.List[DecoderLayer | LayerStack] = nnx.List(
            [LayerStack(group, partition, make) for group in layer_plan(model.blocks)]
            if scans
            else [DecoderLayer(block, partition, make) for block in model.blocks]
        )
        eps, rows, per_layer = model.rms_norm_eps, (partition.padded_vocab_size, padding), model.per_layer_inputs
        self.per_layer_embedding = (
            PerLayerEmbedding(per_layer, model.num_layers, rows, model.hidden_size, eps, make) if per_layer else None
        )
        self.norm = stream_norm("norm", "model.norm", model, make)
        self.lm_head = (
            None if model.tied_embeddings else make.table("lm_head", axes, tensors("lm_head.weight"), padding=padding)
        )
        names = {"vocabulary": partition.padded_vocab_size}
        bias = tensors("lm_head.bias")
        self.lm_head_bias = (
            make.bias("lm_head_bias", names, bias, exact=True, padding=padding) if model.head_bias else None
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
        x = self._embedded(token_ids, step)
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
                first, taps = None if inputs is None else inputs[0, 0], taps.before(start, x)
                places = [
                    (layout.array(place, stacked=False), Place(place.group, None)) for place in layout.places[start]
                ]
                written, x = layer(x, written, places, step, first)
            start += group.num_layers
        taken = taps.taken[: len(layers)]
        if axis is not None:
            x, taken = split_residual.whole(x, axis), split_residual.whole(taken, axis)
        return written, self.norm(x, step.rows), taken

    def _embedded(self, token_ids: Array, step: StepContext) -> Array:
        """i32[...] ids -> f[..., hidden], at their positions if the model has a table of these."""
        x, model = look_up(self.embedding, token_ids, step.adapters, self.partition.axis), self.partition.model
        if model.embedding_multiplier is not None:
            x = x * jnp.asarray(model.embedding_multiplier, x.dtype)
        if self.position_table is not None:
            assert step.positions is not None and model.position_offset is not None
            places = step.positions + np.int32(model.position_offset)
            # a draft may be behind the last position: it is never kept, but what it gives is to be a number
            x = x + jnp.take(self.position_table[...], places, axis=0, mode="clip").astype(x.dtype)
        return x if step.num_tokens is None else zero_behind(x, step.num_tokens, self.embedding.get_value())

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
        bias = None if self.lm_head_bias is None else self.lm_head_bias[...]
        return logits(hidden, self.head, self.partition, adapters, bias)


def logits(
    hidden: Array,
    head: Weight | AdaptedTable,
    partition: Partition,
    adapters: AdapterRows | None = None,
    bias: Array | None = None,
) -> Array:
    """f[..., hidden] -> f32[..., part of the vocabulary]; padding is below all tokens.

    ``bias`` f32[part of the vocabulary] is added first.
    """
    found, cap = table_logits(hidden, head, adapters), partition.model.logit_soft_cap
    if bias is not None:
        found = found + bias.reshape((1,) * (found.ndim - 1) + (-1,))
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
