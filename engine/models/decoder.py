"""The one decoder that oDriver serves; families differ only in their ModelConfig.

The decoder knows nothing of pages. Each layer gives its q, k, v and its cache to the attention of the
StepContext, which returns the cache as it is now and the attended values: paged attention in service,
plain causal attention in training. Leading axes are free: i32[T] in service, i32[batch, length] in
training.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.mesh import TP
from engine.models.config import ModelConfig
from engine.models.linear import Scale, dense, flatten, logits, look_up, pack, pack_table, scale_of
from engine.models.rope import Rotation, inverse_frequencies, rotate, rotation
from engine.models.sharding import part_of
from engine.models.step_context import LayerCache, Place, StepContext
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 whatever x is."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # Scaled in float32 too: a stack of scales that had to be rounded would be, all of it, before every loop.
        return (wide * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Attention(nnx.Module):
    """Rotary self-attention. q, k and v are one kernel, grouped by kv head so that it shards over them."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        grouped = (config.stored_kv_heads, config.group_size + 2, config.head_dim)
        init = nnx.initializers.normal(0.02)
        self.qkv_kernel = nnx.Param(init(rngs.params(), (config.hidden_size, *grouped)))
        self.qkv_bias = nnx.Param(jnp.zeros(grouped)) if config.qkv_bias else None
        o_init = nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)
        self.o_kernel = nnx.Param(o_init(rngs.params(), (config.num_heads * config.head_dim, config.hidden_size)))
        self.o_bias = nnx.Param(jnp.zeros((config.hidden_size,))) if config.output_bias else None
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.qkv_kernel_scale: Scale | None = None
        self.o_kernel_scale: Scale | None = None
        self.spec = AttentionSpec(config.head_dim**-0.5, config.window(layer))
        self.axis = tensor_axis(config)

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        grouped = dense(x, self.qkv_kernel, self.qkv_bias, scale=self.qkv_kernel_scale)
        q = grouped[..., :-2, :].reshape(*x.shape[:-1], -1, grouped.shape[-1])
        k, v = grouped[..., -2, :], grouped[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step.attention.fuses_rotation:
            inputs = AttentionInputs(q, k, v, step.rotation)
        else:
            inputs = AttentionInputs(rotate(q, *step.rotation), rotate(k, *step.rotation), v)
        cache, attended = step.attention(self.spec, cache, place, inputs)
        attended = attended.reshape(*x.shape[:-1], -1)
        return cache, dense(attended, self.o_kernel, self.o_bias, self.axis, self.o_kernel_scale)


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020); gate and up are one kernel f[hidden, 2, ffn], sharded on its last axis."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        gate_up = (2, config.intermediate_size)
        init = nnx.initializers.normal(0.02)
        self.gate_up_kernel = nnx.Param(init(rngs.params(), (config.hidden_size, *gate_up)))
        self.gate_up_bias = nnx.Param(jnp.zeros(gate_up)) if config.mlp_bias else None
        down_init = nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)
        self.down_kernel = nnx.Param(down_init(rngs.params(), (config.intermediate_size, config.hidden_size)))
        self.down_bias = nnx.Param(jnp.zeros((config.hidden_size,))) if config.mlp_bias else None
        self.gate_up_kernel_scale: Scale | None = None
        self.down_kernel_scale: Scale | None = None
        self.axis = tensor_axis(config)

    def __call__(self, x: Array) -> Array:
        gate_up = dense(x, self.gate_up_kernel, self.gate_up_bias, scale=self.gate_up_kernel_scale)
        activated = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return dense(activated, self.down_kernel, self.down_bias, self.axis, self.down_kernel_scale)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        cache, attended = self.attention(self.attention_norm(x), cache, place, step)
        x = x + attended
        return cache, x + self.mlp(self.mlp_norm(x))


class LayerStack(nnx.Module):
    """Layers that are alike, each parameter one array of them all: compiled once, and gone through by ``lax.scan``."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        graph = nnx.graphdef(layers[0])
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(layer) for layer in layers))
        self.layer = nnx.merge(graph, stacked)
        self.count = len(layers)

    def __call__(self, x: Array, cache: LayerCache, step: StepContext) -> tuple[LayerCache, Array]:
        graph, weights = nnx.split(self.layer)

        def one(carry: tuple[LayerCache, Array], each: tuple[Any, Array]) -> tuple[tuple[LayerCache, Array], None]:
            (cache, x), (weights, place) = carry, each
            return nnx.merge(graph, weights)(x, cache, place, step), None

        places = jnp.arange(self.count, dtype=jnp.int32)
        return jax.lax.scan(one, (cache, x), (weights, places))[0]


class Decoder(nnx.Module):
    """Token ids to the last hidden state, and hidden states to logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        vocabulary = (config.padded_vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), vocabulary))
        self.layers: nnx.List[DecoderLayer | LayerStack] = nnx.List(
            [DecoderLayer(config, layer, rngs) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tied_embeddings else nnx.Param(init(rngs.params(), vocabulary))
        self.embedding_scale: Scale | None = None
        self.lm_head_scale: Scale | None = None
        self.config = config

    def __call__(
        self, token_ids: Array, caches: Sequence[LayerCache], step: StepContext
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids, one cache per layer or stack -> caches, normed hidden states [..., hidden]."""
        x = look_up(self.embedding, token_ids, tensor_axis(self.config), self.embedding_scale)
        written: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            if isinstance(layer, LayerStack):
                cache, x = layer(x, cache, step)
            else:
                cache, x = layer(x, cache, None, step)
            written.append(cache)
        return written, self.norm(x)

    def rotation(self, positions: Array) -> Rotation:
        """What rotates queries and keys at i32[...] positions."""
        return rotation(positions, inverse_frequencies(self.config.head_dim, self.config.rope))

    @property
    def head_and_scale(self) -> list[Any]:
        """What hidden states are turned into logits by: a table [vocab, hidden], packed or not, and its scale if it is int8."""
        table, scale = self.lm_head, self.lm_head_scale
        if table is None:
            table, scale = self.embedding, self.embedding_scale
        return [table] if scale is None else [table, scale]

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] -> f32[..., vocab]; of each device its own part of the padded vocabulary."""
        return without_padding(logits(hidden, *self.head_and_scale), self.config)

    def pack(self) -> None:
        """Repack every weight for the CPU's own kernels, one at a time; activations are float32 from then on.

        Raises KernelsUnavailable.
        """
        self.embedding = pack_table(self.embedding)
        if self.lm_head is not None:
            self.lm_head = pack_table(self.lm_head)
        self._replace_kernels(lambda _, kernel: pack(kernel))

    def flatten(self) -> None:
        """Make every kernel a matrix: what a TPU multiplies by where it lies."""
        devices = self.config.tensor_parallel_size
        self._replace_kernels(lambda name, kernel: flatten(kernel, part_of(name, kernel.shape, devices)[1:]))

    def quantize(self, activations: np.dtype) -> None:
        """Make kernels and tables int8, of shapes alone: their numbers and scales are made as they are loaded."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "before they are stacked"
            for module, name in _kernels(layer):
                _quantize(module, name, 0, activations)
        _quantize(self, "embedding", 1, activations)
        if self.lm_head is not None:
            _quantize(self, "lm_head", 1, activations)

    def stack(self) -> None:
        """Make each run of layers that are alike a LayerStack."""
        layers = iter(list(self.layers))
        self.layers = nnx.List(
            [LayerStack([next(layers) for _ in range(count)]) for count in self.config.runs]  # type: ignore[misc]
        )

    def _replace_kernels(self, made_of: Callable[[str, nnx.Param[Array]], nnx.Param[Any]]) -> None:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "before they are stacked"
            for module, name in _kernels(layer):
                setattr(module, name, made_of(name, getattr(module, name)))


def _kernels(layer: DecoderLayer) -> list[tuple[nnx.Module, str]]:
    """Where a layer's kernels are."""
    attention, mlp = layer.attention, layer.mlp
    return [(attention, "qkv_kernel"), (attention, "o_kernel"), (mlp, "gate_up_kernel"), (mlp, "down_kernel")]


def _quantize(module: nnx.Module, name: str, axis: int, activations: np.dtype) -> None:
    weight = getattr(module, name)
    setattr(module, f"{name}_scale", nnx.data(scale_of(weight, axis, activations)))
    setattr(module, name, weight.replace(weight[...].astype(np.int8)))


def tensor_axis(config: ModelConfig) -> str | None:
    """The mesh axis that a model is split over; None on one device."""
    return TP if config.tensor_parallel_size > 1 else None


def without_padding(logits: Array, config: ModelConfig) -> Array:
    """Logits f32[..., part of the vocabulary] of this device, those of ids that are no tokens below all others."""
    if config.padded_vocab_size == config.vocab_size:
        return logits
    count = logits.shape[-1]
    ids = Vocabulary(TP).first(count) + jnp.arange(count, dtype=jnp.int32)
    return jnp.where((ids < config.vocab_size).reshape((1,) * (logits.ndim - 1) + (-1,)), logits, NO_TOKEN_LOGIT)
