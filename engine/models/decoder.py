"""The one decoder that oDriver serves; families differ only in their ModelConfig.

The decoder knows nothing of pages. Each layer hands its q, k, v to an ``attend`` function together with
that layer's cache and gets back the cache as it is now and the attended values: paged attention in
service, plain causal attention in training. Leading axes are free: i32[T] in service, i32[batch, length]
in training.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.config import ModelConfig
from engine.models.linear import dense, flatten, logits, look_up, pack, pack_table
from engine.models.rope import Rotation, inverse_frequencies, rotation

LayerCache = Array | None
Attend = Callable[[LayerCache, Array, Array, Array, Rotation, int | None], tuple[LayerCache, Array]]
"""(cache, q[..., heads, head_dim], k[..., kv_heads, head_dim], v like k, rotation, window) -> (cache, like q).

It is ``attend`` that turns q and k by the rotation, as a kernel does that in passing."""


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 whatever x is."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nnx.Module):
    """Rotary self-attention. q, k and v are one kernel, grouped by kv head so that it shards over them."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        grouped = (config.num_kv_heads, config.group_size + 2, config.head_dim)
        init = nnx.initializers.normal(0.02)
        self.qkv_kernel = nnx.Param(init(rngs.params(), (config.hidden_size, *grouped)))
        self.qkv_bias = nnx.Param(jnp.zeros(grouped)) if config.qkv_bias else None
        o_init = nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)
        self.o_kernel = nnx.Param(o_init(rngs.params(), (config.num_heads * config.head_dim, config.hidden_size)))
        self.o_bias = nnx.Param(jnp.zeros((config.hidden_size,))) if config.output_bias else None
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.window = config.window(layer)

    def __call__(self, x: Array, rotation: Rotation, cache: LayerCache, attend: Attend) -> tuple[LayerCache, Array]:
        grouped = dense(x, self.qkv_kernel, self.qkv_bias)
        q = grouped[..., :-2, :].reshape(*x.shape[:-1], -1, grouped.shape[-1])
        k, v = grouped[..., -2, :], grouped[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cache, attended = attend(cache, q, k, v, rotation, self.window)
        return cache, dense(attended.reshape(*x.shape[:-1], -1), self.o_kernel, self.o_bias)


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

    def __call__(self, x: Array) -> Array:
        gate_up = dense(x, self.gate_up_kernel, self.gate_up_bias)
        return dense(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], self.down_kernel, self.down_bias)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: Array, rotation: Rotation, cache: LayerCache, attend: Attend) -> tuple[LayerCache, Array]:
        cache, attended = self.attention(self.attention_norm(x), rotation, cache, attend)
        x = x + attended
        return cache, x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Token ids to the last hidden state, and hidden states to logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), vocabulary))
        self.layers = nnx.List([DecoderLayer(config, layer, rngs) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tied_embeddings else nnx.Param(init(rngs.params(), vocabulary))
        self.config = config

    def __call__(
        self, token_ids: Array, positions: Array, caches: Sequence[LayerCache], attend: Attend
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids and positions, one cache per layer -> caches, normed hidden states [..., hidden]."""
        turns = rotation(positions, inverse_frequencies(self.config.head_dim, self.config.rope))
        x = look_up(self.embedding, token_ids)
        written: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, turns, cache, attend)
            written.append(cache)
        return written, self.norm(x)

    @property
    def head(self) -> nnx.Param[Array]:
        """What hidden states are turned into logits by: a table [vocab, hidden], packed or not."""
        return self.embedding if self.lm_head is None else self.lm_head

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] -> f32[..., vocab]."""
        return logits(hidden, self.head)

    def pack(self) -> None:
        """Repack every weight for the CPU's own kernels, one at a time; activations are float32 from then on.

        Raises KernelsUnavailable.
        """
        self.embedding = pack_table(self.embedding)
        if self.lm_head is not None:
            self.lm_head = pack_table(self.lm_head)
        self._replace_kernels(pack)

    def flatten(self) -> None:
        """Make every kernel a matrix, one at a time: what a TPU multiplies by where it lies."""
        self._replace_kernels(flatten)

    def _replace_kernels(self, made_of: Callable[[nnx.Param[Array]], nnx.Param[Any]]) -> None:
        for layer in self.layers:
            for module, name in (
                (layer.attention, "qkv_kernel"),
                (layer.attention, "o_kernel"),
                (layer.mlp, "gate_up_kernel"),
                (layer.mlp, "down_kernel"),
            ):
                setattr(module, name, made_of(getattr(module, name)))
