"""Self-attention with grouped kv heads, and the norms of its queries, keys and values."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.models.layers.mixer import Cached, KeysAndValues, OfLayer, OfModel
from engine.models.layers.norm import JointNorm, RMSNorm
from engine.models.layers.row_operations import norm_factor
from engine.models.linear import linear
from engine.models.partition import Partition
from engine.models.requirements import require
from engine.models.rope import half_split, rotate
from engine.models.rope_spec import RopeSpec
from engine.models.spec import BlockSpec
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors


@dataclass(frozen=True)
class SelfAttentionSpec:
    """Self-attention with grouped kv heads, a MixerSpec."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scores: AttentionSpec
    """The scale, window and soft cap of this layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Each query and key head goes through an RMSNorm before it is rotated."""
    joint_qk_norm: bool = False
    """All query heads go through one RMSNorm before they are rotated, and all key heads."""
    rope: RopeSpec = field(default_factory=RopeSpec)
    sinks: bool = False
    """Each head has a learned score of a key without a value, which all its queries see."""
    value_norm: bool = False
    """Each value head goes through an RMSNorm without scales."""
    unit_qk_norm: bool = False
    """Each query and key head goes through an RMSNorm without scales."""
    keys_are_values: bool = False
    """Values are the keys as they are before norm and rotation."""
    kv_source: int | None = None
    """The layer whose keys and values are read; None is this one."""
    of_model: bool = False
    """Whether that is a layer of the model that a draft head drafts for."""
    gated: bool = False
    """What a head attends to is multiplied by a sigmoid of the input (Qwen3-Next)."""
    gate_proj: bool = False
    """It is, but the gates have a kernel of their own and are not beside the queries (AFMoE)."""
    gates_by_head: bool = False
    """Those of that kernel are one a head, not one a number (LFM3)."""
    norms_behind_rope: bool = False
    """``qk_norm`` is of the rotated heads (Hunyuan)."""
    clip: float | None = None
    """Queries, keys and values are clamped to it, on both sides of 0 (OLMo)."""
    norms_by_head: bool = False
    """``qk_norm`` subtracts the mean, and has scales of each head's own (Command R+)."""
    value_dim: int | None = None
    """Numbers of a value head where a key's are more; values then have a kernel of their own (MiMo-V2)."""
    input_size: int | None = None
    """Numbers of a token's input, where they are not the model's hidden size."""

    def __post_init__(self) -> None:
        """Raises UnsupportedError for values that pages for such keys have no room for."""
        assert self.gate_proj or not self.gates_by_head
        keys, values = self.head_dim, self.value_dim or 0
        require(values <= keys, f"values of {values} numbers a head, more than the {keys} of keys, are not supported")

    @property
    def cached(self) -> Cached:
        """See MixerSpec."""
        if self.kv_source is not None and self.of_model:
            return OfModel(self.kv_source, self.scores.reach)
        if self.kv_source is not None:
            return OfLayer(self.kv_source, self.scores.reach)
        return KeysAndValues(self.num_kv_heads, self.head_dim, self.scores.reach)

    @property
    def rotated(self) -> tuple[RopeSpec, int]:
        """See MixerSpec."""
        return self.rope, self.head_dim

    @property
    def extras(self) -> str | None:
        """See MixerSpec."""
        if self.sinks:
            return "attention sinks"
        if self.scores.chunk:
            return "chunks of attention"
        if self.scores.first:
            return "tokens that no other sees"
        return None if self.kv_source is None else "layers that read another's keys"

    def flops(self, tokens: int, devices: int) -> int:
        """See MixerSpec."""
        return 4 * self.num_heads // devices * self.head_dim * min(tokens, self.scores.reach or tokens)

    def indivisible(self, devices: int) -> str | None:
        """See MixerSpec."""
        return f"the {self.num_heads} attention heads" if self.num_heads % devices else None

    def scratch(self, head_dim: int, devices: int) -> int:
        """See MixerSpec."""
        return 4 * self.num_heads * head_dim // devices

    def build(self, partition: Partition, make: ParameterFactory) -> "SelfAttention":
        """See MixerSpec."""
        return SelfAttention(self, partition, make)


def self_attention(block: BlockSpec) -> SelfAttentionSpec:
    """The mixer of a block that has self-attention."""
    assert isinstance(block.mixer, SelfAttentionSpec)
    return block.mixer


class SelfAttention(nnx.Module):
    """Self-attention. q, k and v are one kernel, grouped by kv head so that it shards.

    A layer that reads another's keys and values has q alone.
    """

    def __init__(self, spec: SelfAttentionSpec, partition: Partition, make: ParameterFactory) -> None:
        model, kv_heads = partition.model, partition.stored_kv_heads
        inputs = {"hidden": spec.input_size or model.hidden_size}
        self.value_dim = spec.value_dim or spec.head_dim
        hidden, heads = {"hidden": model.hidden_size}, {"heads": spec.num_heads * self.value_dim}
        self.group, replicas = spec.num_heads // kv_heads, kv_heads // spec.num_kv_heads
        without_values = spec.keys_are_values or spec.value_dim is not None
        self.parts = "q" if spec.kv_source is not None else "qk" if without_values else "qkv"
        self.queries = self.group * (2 if spec.gated else 1)
        grouped = {"kv_heads": kv_heads, "group": self.queries + len(self.parts) - 1, "head_dim": spec.head_dim}
        qkv = _fused("weight", *self.parts), _fused("bias", *self.parts)
        self.qkv_kernel = make.kernel("attention.qkv_kernel", inputs, grouped, qkv[0], kv_replicas=replicas)
        self.qkv_bias = (
            make.bias("attention.qkv_bias", grouped, qkv[1], kv_replicas=replicas) if spec.qkv_bias else None
        )
        self.values = (
            Values(spec.value_dim, inputs, kv_heads, replicas, spec.qkv_bias, make) if spec.value_dim else None
        )
        gates = {"heads": spec.num_heads} if spec.gates_by_head else heads
        self.gate_kernel = (
            make.kernel("attention.gate_kernel", inputs, gates, _fused("weight", "gate")) if spec.gate_proj else None
        )
        self.o_kernel = make.kernel("attention.o_kernel", heads, hidden, _fused("weight", "o"), last=True)
        self.o_bias = make.bias("attention.o_bias", hidden, _fused("bias", "o")) if spec.output_bias else None
        sinks = tensors(f"{LAYER}self_attn.sinks")
        self.sinks = make.scale("attention.sinks", {"heads": spec.num_heads}, sinks) if spec.sinks else None
        self.norms = QKVNorms(spec, self.parts, model.rms_norm_eps, kv_heads, make)
        self.clip = None if spec.clip is None else np.float32(spec.clip)
        self.scores, self.axis, self.paged_head_dim = spec.scores, make.axis, model.head_dim
        self.rope, self.interleaved = model.ropes.index(spec.rotated), spec.rope.interleaved
        is_changed = spec.gated or self.interleaved or self.norms.has_any or spec.head_dim != model.head_dim
        self.stays_together = self.parts == "qkv" and not is_changed

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        grouped = linear(x, self.qkv_kernel, self.qkv_bias, step.adapters)
        if self.clip is not None:
            most = self.clip.astype(grouped.dtype)
            grouped = jnp.clip(grouped, -most, most)
        q, k, v, gate = grouped[..., : self.queries, :], None, None, None
        if "k" in self.parts:
            k, v = grouped[..., self.queries, :], grouped[..., -1, :]
        if self.values is not None:
            v = self.values(x, step)
        if self.queries > self.group:
            q, gate = q[..., ::2, :], q[..., 1::2, :]
        if self.gate_kernel is not None:
            gate = linear(x, self.gate_kernel, None, step.adapters)
        q, k, v = self.norms(q, k, v)
        cache, attended = step.attention(self.scores, cache, place, self._inputs(q, k, v, grouped, step))
        attended = attended[..., : self.value_dim]
        if gate is not None:
            attended = _gated(attended, gate)
        attended = attended.reshape(*x.shape[:-1], -1)
        return cache, linear(attended, self.o_kernel, self.o_bias, step.adapters, self.axis)

    def _inputs(self, q: Array, k: Array | None, v: Array | None, grouped: Array, step: StepContext) -> AttentionInputs:
        """Queries and keys at their positions, padded to the head_dim of pages; ``grouped`` is what they were cut from."""
        cos, sin, query_scale = step.rotations[self.rope]
        if query_scale is not None:
            q = (q.astype(jnp.float32) * query_scale).astype(q.dtype)
        sinks = None if self.sinks is None else self.sinks[...]
        fuses, is_early = step.attention.fuses_rotation, self.norms.behind_rope

        def turned(x: Array, norm: RMSNorm | None) -> Array:
            x = half_split(x, 2 * cos.shape[-1]) if self.interleaved else x
            x = x if fuses and not is_early else rotate(x, cos, sin)
            return self._padded(norm(x) if is_early and norm is not None else x)

        queries, keys = turned(q, self.norms.q), None if k is None else turned(k, self.norms.k)
        values = None if v is None else self._padded(v)
        if not fuses:
            return AttentionInputs(queries, keys, values, None, sinks)
        rotation = (cos[..., :0], sin[..., :0]) if is_early else (cos, sin)
        together = grouped if self.stays_together and query_scale is None else None
        return AttentionInputs(queries, keys, values, rotation, sinks, together)

    def _padded(self, x: Array) -> Array:
        missing = self.paged_head_dim - x.shape[-1]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


class Values(nnx.Module):
    """The kernel of values that are narrower than keys: f[..., hidden] -> f[..., kv_heads, size]."""

    def __init__(
        self, size: int, inputs: Axes, kv_heads: int, replicas: int, has_bias: bool, make: ParameterFactory
    ) -> None:
        outputs, (weight, bias) = {"kv_heads": kv_heads, "head_dim": size}, map(_values_rule, ("weight", "bias"))
        self.kernel = make.kernel("attention.value_kernel", inputs, outputs, weight, kv_replicas=replicas)
        self.bias = make.bias("attention.value_bias", outputs, bias, kv_replicas=replicas) if has_bias else None

    def __call__(self, x: Array, step: StepContext) -> Array:
        return linear(x, self.kernel, self.bias, step.adapters)


class QKVNorms(nnx.Module):
    """The RMSNorms that a SelfAttentionSpec asks for, each f[..., head_dim] or over all heads."""

    def __init__(self, spec: SelfAttentionSpec, parts: str, eps: float, kv_heads: int, make: ParameterFactory) -> None:
        head, replicas = {"head_dim": spec.head_dim}, kv_heads // spec.num_kv_heads

        def norm(part: str, heads: Axes, copies: int) -> RMSNorm | None:
            if not spec.qk_norm or part not in parts:
                return None
            name, rule = f"attention.{part}_norm", _norm_rule(part)
            if not spec.norms_by_head:
                return RMSNorm(name, head, eps, rule, make)
            (axis,) = heads
            rule = replace(rule, stored=f"{axis} head_dim", repeated=(0,))
            return RMSNorm(name, {**heads, **head}, eps, rule, make, centered=True, kv_replicas=copies)

        self.q, self.k = norm("q", {"heads": spec.num_heads}, 1), norm("k", {"kv_heads": kv_heads}, replicas)
        self.behind_rope = spec.norms_behind_rope
        every = {"kv_heads": kv_heads, "group": spec.num_heads // kv_heads + 1, **head}
        rule = _norm_rule("q", "k")
        self.joint = JointNorm("attention.qk_norm", every, eps, rule, make, replicas) if spec.joint_qk_norm else None
        self.qk_eps, self.v_eps = eps if spec.unit_qk_norm else None, eps if spec.value_norm else None

    @property
    def has_any(self) -> bool:
        """Whether it changes what it is given."""
        return any(norm is not None for norm in (self.q, self.k, self.joint, self.qk_eps, self.v_eps))

    def __call__(self, q: Array, k: Array | None, v: Array | None) -> tuple[Array, Array | None, Array | None]:
        """q f[..., kv_heads, group, head_dim], k and v f[..., kv_heads, head_dim] -> q by heads.

        Without the norms of rotated heads.
        """
        if self.joint is not None and k is not None:
            q, k = self.joint(q, k)
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
        if not self.behind_rope:
            q = q if self.q is None else self.q(q)
            k = k if self.k is None or k is None else self.k(k)
        if self.qk_eps is not None and k is not None:
            q, k = _of_unit_length(q, self.qk_eps), _of_unit_length(k, self.qk_eps)
        if self.v_eps is not None and v is not None:
            v = _of_unit_length(v, self.v_eps)
        return q, k, v


def _gated(attended: Array, gate: Array) -> Array:
    """f[..., heads, size] times the sigmoid of a gate for each number, or of one for each head."""
    opened = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(*attended.shape[:-1], -1)
    return (attended.astype(jnp.float32) * opened).astype(attended.dtype)


def _of_unit_length(x: Array, eps: float) -> Array:
    """An RMSNorm without scales."""
    wide = x.astype(jnp.float32)
    return (wide * norm_factor(wide, eps)).astype(x.dtype)


def _norm_rule(*parts: str) -> TensorRule:
    names = (f"{LAYER}self_attn.{part}_norm.weight" for part in parts)
    return tensors(*names, along="group" if parts[1:] else None)


def _fused(kind: str, *names: str) -> TensorRule:
    return tensors(*(f"{LAYER}self_attn.{name}_proj.{kind}" for name in names), along="group" if names[1:] else None)


def _values_rule(kind: str) -> TensorRule:
    return tensors(f"{LAYER}self_attn.v_proj.{kind}", repeated=(0,))
