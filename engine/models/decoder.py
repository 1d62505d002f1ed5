"""The one decoder that oDriver serves; families differ only in their ModelSpec.

The decoder does not depend on pages. Each layer passes q, k, v and its cache to the attention of
the StepContext, which returns the updated cache and the result: paged attention in service, plain
causal attention in training. Leading axes are free: i32[T] in service, i32[batch, length] in
training.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.attention.spec import AttentionInputs
from engine.mesh import TP
from engine.models.linear import linear, look_up
from engine.models.norm import RMSNorm
from engine.models.partition import Partition
from engine.models.rope import Rotation, inverse_frequencies, rotate, rotation
from engine.models.spec import BlockSpec, LayerGroup, SelfAttentionSpec, layer_plan
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.forms import Weight
from engine.models.weights.parameters import LAYER, TensorRule, tensors
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


class Attention(nnx.Module):
    """Rotary self-attention. q, k and v are one kernel, grouped by kv head so that it shards."""

    def __init__(self, spec: SelfAttentionSpec, partition: Partition, make: ParameterFactory) -> None:
        model, kv_heads, replicas = partition.model, partition.stored_kv_heads, partition.kv_replicas
        hidden, heads = {"hidden": model.hidden_size}, {"heads": spec.num_heads * spec.head_dim}
        grouped = {"kv_heads": kv_heads, "group": spec.num_heads // kv_heads + 2, "head_dim": spec.head_dim}
        qkv = _fused("weight", "q", "k", "v"), _fused("bias", "q", "k", "v")
        self.qkv_kernel = make.kernel("attention.qkv_kernel", hidden, grouped, qkv[0], kv_replicas=replicas)
        self.qkv_bias = (
            make.bias("attention.qkv_bias", grouped, qkv[1], kv_replicas=replicas) if spec.qkv_bias else None
        )
        self.o_kernel = make.kernel("attention.o_kernel", heads, hidden, _fused("weight", "o"), last=True)
        self.o_bias = make.bias("attention.o_bias", hidden, _fused("bias", "o")) if spec.output_bias else None
        self.q_norm, self.k_norm = (
            RMSNorm(
                f"attention.{name}", {"head_dim": spec.head_dim}, model.rms_norm_eps, _norm(f"self_attn.{name}"), make
            )
            if spec.qk_norm
            else None
            for name in ("q_norm", "k_norm")
        )
        self.scores, self.axis = spec.scores, make.axis

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        grouped = linear(x, self.qkv_kernel, self.qkv_bias)
        q = grouped[..., :-2, :].reshape(*x.shape[:-1], -1, grouped.shape[-1])
        k, v = grouped[..., -2, :], grouped[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step.attention.fuses_rotation:
            inputs = AttentionInputs(q, k, v, step.rotation)
        else:
            inputs = AttentionInputs(rotate(q, *step.rotation), rotate(k, *step.rotation), v)
        cache, attended = step.attention(self.scores, cache, place, inputs)
        attended = attended.reshape(*x.shape[:-1], -1)
        return cache, linear(attended, self.o_kernel, self.o_bias, self.axis)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each between its norms and added to the residual stream."""

    def __init__(self, spec: BlockSpec, partition: Partition, make: ParameterFactory) -> None:
        hidden, eps, norms = {"hidden": partition.model.hidden_size}, partition.model.rms_norm_eps, spec.norms

        def norm(name: str, stored: str, wanted: bool) -> RMSNorm | None:
            return RMSNorm(name, hidden, eps, _norm(stored), make) if wanted else None

        self.attention_norm = norm("attention_norm", "input_layernorm", norms.before)
        self.attention = Attention(spec.mixer, partition, make)
        self.attention_post_norm = norm("attention_post_norm", "post_attention_layernorm", norms.after)
        mlp_norm = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        self.mlp_norm = norm("mlp_norm", mlp_norm, norms.before)
        self.mlp = spec.feed_forward.build(partition.model.hidden_size, make)
        self.mlp_post_norm = norm("mlp_post_norm", "post_feedforward_layernorm", norms.after)

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        cache, attended = self.attention(_normed(x, self.attention_norm), cache, place, step)
        x = x + _normed(attended, self.attention_post_norm)
        return cache, x + _normed(self.mlp(_normed(x, self.mlp_norm)), self.mlp_post_norm)


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

    def __call__(self, x: Array, cache: LayerCache, step: StepContext) -> tuple[LayerCache, Array]:
        graph, weights = nnx.split(self.blocks)
        period = len(self.blocks)

        def repeat(carry: tuple[LayerCache, Array], each: tuple[Any, Array]) -> tuple[tuple[LayerCache, Array], None]:
            (cache, x), (weights, first) = carry, each
            blocks: nnx.List[DecoderLayer] = nnx.merge(graph, weights)
            for number, block in enumerate(blocks):
                cache, x = block(x, cache, first + np.int32(number), step)
            return (cache, x), None

        firsts = jnp.arange(0, self.repeats * period, period, dtype=jnp.int32)
        return jax.lax.scan(repeat, (cache, x), (weights, firsts))[0]


class Decoder(nnx.Module):
    """Token ids to the last hidden state, and hidden states to logits."""

    def __init__(self, partition: Partition, rngs: nnx.Rngs, *, scans: bool = False) -> None:
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
        self.norm = RMSNorm(
            "norm", {"hidden": model.hidden_size}, model.rms_norm_eps, tensors("model.norm.weight"), make
        )
        self.lm_head = (
            None if model.tied_embeddings else make.table("lm_head", axes, tensors("lm_head.weight"), padding=padding)
        )
        self.partition = partition
        make.require_all_rules_used()

    def __call__(
        self, token_ids: Array, caches: Sequence[LayerCache], step: StepContext
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids, a cache per layer or stack -> caches, normed f[..., hidden]."""
        x = look_up(self.embedding.get_value(), token_ids, self.partition.axis)
        if self.partition.model.embedding_multiplier is not None:
            x = x * jnp.asarray(self.partition.model.embedding_multiplier, x.dtype)
        written: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            if isinstance(layer, LayerStack):
                cache, x = layer(x, cache, step)
            else:
                cache, x = layer(x, cache, None, step)
            written.append(cache)
        return written, self.norm(x)

    def rotation(self, positions: Array) -> Rotation:
        """The cosines and sines of queries and keys at i32[...] positions."""
        model = self.partition.model
        return rotation(positions, inverse_frequencies(model.attention.head_dim, model.rope))

    @property
    def head(self) -> Weight:
        """The table [vocab, hidden] for logits."""
        return (self.embedding if self.lm_head is None else self.lm_head).get_value()

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] -> f32[..., vocab], on each device its part of the padded vocabulary."""
        return logits(hidden, self.head, self.partition)


def logits(hidden: Array, head: Weight, partition: Partition) -> Array:
    """f[..., hidden] -> f32[..., part of the vocabulary]; padding is below all tokens."""
    found, cap = head.logits(hidden), partition.model.logit_soft_cap
    if cap is not None:
        found = np.float32(cap) * jnp.tanh(found / np.float32(cap))
    if partition.padded_vocab_size == partition.model.vocab_size:
        return found
    count = found.shape[-1]
    ids = Vocabulary(TP).first(count) + jnp.arange(count, dtype=jnp.int32)
    is_token = (ids < partition.model.vocab_size).reshape((1,) * (found.ndim - 1) + (-1,))
    return jnp.where(is_token, found, NO_TOKEN_LOGIT)


def _normed(x: Array, norm: RMSNorm | None) -> Array:
    return x if norm is None else norm(x)


def _fused(kind: str, *names: str) -> TensorRule:
    return tensors(*(f"{LAYER}self_attn.{name}_proj.{kind}" for name in names), along="group" if names[1:] else None)


def _norm(name: str) -> TensorRule:
    return tensors(f"{LAYER}{name}.weight")
