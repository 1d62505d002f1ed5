"""Multi-head latent attention (DeepSeek-V2): all heads' keys and values are made of one latent.

A token's latent is what is cached. It is normed before it is stored, and the key behind it, which
all heads share, is rotated. Each device has all latents and its own heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.attention.latent_projections import LatentProjections
from caching.attention.spec import LatentInputs, LatentSpec
from engine.models.adapters.adapted import AdapterRows
from engine.models.adapters.adapted_latents import AdaptedLatents
from engine.models.layers.mixer import Latents
from engine.models.layers.norm import RMSNorm
from engine.models.linear import UNSAID, linear
from engine.models.partition import Partition
from engine.models.rope import half_split, rotate
from engine.models.rope_spec import RopeSpec
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors

NORM_EPS = 1e-6
"""Of the norms within attention, whatever ``rms_norm_eps`` is."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention, a MixerSpec. The names are those of config.json."""

    num_heads: int
    kv_lora_rank: int
    """Numbers of a latent without the shared key."""
    qk_nope_head_dim: int
    """Of a head's query, for the head's own keys."""
    qk_rope_head_dim: int
    """Of a head's query, for the shared key."""
    v_head_dim: int
    scale: float
    """Scores are multiplied by it."""
    rope: RopeSpec
    q_lora_rank: int | None
    """Queries are made of a latent of their own, too."""
    bias: bool
    """The projections to latents and the last one have biases."""
    first: int = 0
    """As in AttentionSpec."""
    extras: ClassVar[None] = None

    @property
    def cached(self) -> Latents:
        """See MixerSpec."""
        return Latents(self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def rotated(self) -> tuple[RopeSpec, int]:
        """See MixerSpec."""
        return self.rope, self.qk_rope_head_dim

    def flops(self, tokens: int, devices: int) -> int:
        """See MixerSpec. A decoding token's, which scores the latents themselves."""
        return 2 * self.num_heads // devices * (2 * self.kv_lora_rank + self.qk_rope_head_dim) * tokens

    def indivisible(self, devices: int) -> str | None:
        """See MixerSpec."""
        return f"the {self.num_heads} attention heads" if self.num_heads % devices else None

    def scratch(self, head_dim: int, devices: int) -> int:
        """See MixerSpec: queries in both forms, and the values of a prompt twice."""
        query = self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.num_heads // devices * (2 * query + head_dim + 3 * self.v_head_dim)

    def build(self, partition: Partition, make: ParameterFactory) -> "LatentAttention":
        """See MixerSpec."""
        return LatentAttention(self, partition, make)


class LatentAttention(nnx.Module):
    """Latent attention. ``kv_b`` f[heads, nope + v, rank] makes keys and values of latents."""

    def __init__(self, spec: LatentAttentionSpec, partition: Partition, make: ParameterFactory) -> None:
        hidden = {"hidden": partition.model.hidden_size}
        latent = {"latent": spec.kv_lora_rank + spec.qk_rope_head_dim}
        heads = {"heads": spec.num_heads}
        queries = heads | {"head_dim": spec.qk_nope_head_dim + spec.qk_rope_head_dim}
        rank = spec.q_lora_rank
        self.query_latents = None if rank is None else QueryLatents(rank, hidden, make, bias=spec.bias)
        inputs, stored = (hidden, "q_proj") if rank is None else ({"latent": rank}, "q_b_proj")
        self.q_kernel = make.kernel("attention.q_kernel", inputs, queries, _stored(stored))
        self.kv_a_kernel = make.kernel("attention.kv_a_kernel", hidden, latent, _stored("kv_a_proj_with_mqa"))
        self.kv_a_bias = (
            make.bias("attention.kv_a_bias", latent, _stored("kv_a_proj_with_mqa", "bias")) if spec.bias else None
        )
        own = {"latent": spec.kv_lora_rank}
        self.kv_a_norm = RMSNorm("attention.kv_a_norm", own, NORM_EPS, _stored("kv_a_layernorm"), make)
        each = {"head_dim": spec.qk_nope_head_dim + spec.v_head_dim}
        rule = tensors(f"{LAYER}self_attn.kv_b_proj.weight", stored="(heads head_dim) latent")
        self.kv_b = make.array("attention.kv_b", heads | each | own, rule)
        values = {"heads": spec.num_heads * spec.v_head_dim}
        self.o_kernel = make.kernel("attention.o_kernel", values, hidden, _stored("o_proj"), last=True)
        self.o_bias = make.bias("attention.o_bias", hidden, _stored("o_proj", "bias")) if spec.bias else None
        self.spec, self.axis = spec, make.axis
        self.rope = partition.model.ropes.index(spec.rotated)

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        latents = x if self.query_latents is None else self.query_latents(x, step.adapters)
        q = linear(latents, self.q_kernel, None, step.adapters)
        query_scale, nope = step.rotations[self.rope][2], self.spec.qk_nope_head_dim
        if query_scale is not None:
            q = (q.astype(jnp.float32) * query_scale).astype(q.dtype)
        inputs = LatentInputs(
            q[..., :nope], self._turned(q[..., nope:], step), self._latents(x, step), self._projections(x.dtype, step)
        )
        scores = LatentSpec(self.spec.scale, self.spec.kv_lora_rank, self.spec.first)
        cache, attended = step.attention(scores, cache, place, inputs)
        return cache, linear(attended.reshape(*x.shape[:-1], -1), self.o_kernel, self.o_bias, step.adapters, self.axis)

    def _projections(self, dtype: np.dtype, step: StepContext) -> LatentProjections:
        weight, nope = self.kv_b.get_value(), self.spec.qk_nope_head_dim
        if not isinstance(weight, AdaptedLatents):
            return LatentProjections(weight.astype(dtype), nope)
        assert step.adapters is not None, UNSAID
        return weight.projections(dtype, nope, step.adapters)

    def _latents(self, x: Array, step: StepContext) -> Array:
        """f[..., hidden] -> f[..., rank + rope]."""
        both, rank = linear(x, self.kv_a_kernel, self.kv_a_bias, step.adapters), self.spec.kv_lora_rank
        shared = self._turned(both[..., None, rank:], step)[..., 0, :]
        return jnp.concatenate([self.kv_a_norm(both[..., :rank]), shared], axis=-1)

    def _turned(self, x: Array, step: StepContext) -> Array:
        """f[..., heads, rope] rotated; interleaved dimensions come out one half after the other."""
        cos, sin, _ = step.rotations[self.rope]
        return rotate(half_split(x, x.shape[-1]) if self.spec.rope.interleaved else x, cos, sin)


class QueryLatents(nnx.Module):
    """f[..., hidden] to normed latents f[..., rank] of queries."""

    def __init__(self, rank: int, hidden: dict[str, int], make: ParameterFactory, *, bias: bool) -> None:
        latent = {"latent": rank}
        self.kernel = make.kernel("attention.q_a_kernel", hidden, latent, _stored("q_a_proj"))
        self.bias = make.bias("attention.q_a_bias", latent, _stored("q_a_proj", "bias")) if bias else None
        self.norm = RMSNorm("attention.q_a_norm", latent, NORM_EPS, _stored("q_a_layernorm"), make)

    def __call__(self, x: Array, adapters: AdapterRows | None) -> Array:
        return self.norm(linear(x, self.kernel, self.bias, adapters))


def _stored(name: str, kind: str = "weight") -> TensorRule:
    return tensors(f"{LAYER}self_attn.{name}.{kind}")
