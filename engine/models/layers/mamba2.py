"""A Mamba-2 layer (Dao and Gu 2024), as Granite 4, Nemotron-H and Falcon-H1 have it."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.state.convolution import convolve
from caching.state.ragged import scan_rows
from caching.state.spec import StateArray
from caching.state.state_space import StateSpace, StateSpaceInputs
from engine.models.layers.activation import Activation
from engine.models.layers.mixer import State
from engine.models.layers.recurrent import FLOAT32, minus_exp, slots_of
from engine.models.layers.row_operations import scaled
from engine.models.linear import linear
from engine.models.partition import Partition
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors


class GatedNorm(Enum):
    """Where the RMSNorm of what a group read is: behind its gates, before them, or nowhere."""

    BEHIND = auto()
    BEFORE = auto()
    NONE = auto()


@dataclass(frozen=True)
class Mamba2Spec:
    """Heads of a group share b and c. A MixerSpec."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    """Tokens that the convolution of x, b and c sees."""
    convolution_bias: bool = True
    bias: bool = False
    """The first product has a bias."""
    output_bias: bool = False
    """The last one has."""
    least_dt: float = 0.0
    most_dt: float = float("inf")
    """A token's time is clamped between the two."""
    prefix: str = f"{LAYER}mamba."
    """Of its tensors."""
    activation: Activation = Activation.SILU
    """Behind the convolution."""
    norm: GatedNorm = GatedNorm.BEHIND
    scales: tuple[float, ...] = ()
    """What the gates, x, b, c and times of the first product are multiplied by, if by anything."""
    rotated: ClassVar[None] = None
    extras: ClassVar[None] = None

    @property
    def cached(self) -> State:
        """See MixerSpec. If there is one group, each device has its b and c."""
        x, shared = StateArray((self.heads * self.head_dim,)), self.groups * self.state_size
        of_group = StateArray((0,), whole=shared) if self.groups == 1 else StateArray((shared,))
        mixed = StateArray((x.shape[0] + 2 * of_group.shape[0],), whole=2 * of_group.whole)
        time = StateArray((self.heads,), FLOAT32)
        of_token = mixed, x, of_group, of_group, time, time  # behind the first as StateSpaceInputs
        state = StateArray((self.heads, self.head_dim, self.state_size), FLOAT32)
        return State((mixed.repeated(self.taps - 1), state), of_token)

    def flops(self, tokens: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 5 * self.heads // devices * self.head_dim * self.state_size

    def indivisible(self, devices: int) -> str | None:
        """See MixerSpec."""
        if self.heads % devices:
            return f"the {self.heads} heads of Mamba-2"
        return f"the {self.groups} groups of Mamba-2" if self.groups > 1 and self.groups % devices else None

    def scratch(self, head_dim: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 8 * self.heads * self.head_dim // devices + 8 * self.groups * self.state_size

    def build(self, partition: Partition, make: ParameterFactory) -> "Mamba2":
        """See MixerSpec."""
        return Mamba2(self, partition, make)


class Mamba2(nnx.Module):
    """All that belongs to a group is in one kernel: gates, x, b, c and times, so that it shards.

    If there are fewer groups than devices, each has a copy of a group's b and c, and some heads.
    """

    def __init__(self, spec: Mamba2Spec, partition: Partition, make: ParameterFactory) -> None:
        replicas = max(1, make.devices // spec.groups)
        groups = {"groups": spec.groups * replicas}
        each = spec.heads // groups["groups"]
        wide, shared = each * spec.head_dim, spec.state_size
        parts: tuple[int, ...] = (wide, wide, shared, shared, each)
        self.parts = parts
        hidden, heads = {"hidden": partition.model.hidden_size}, {"heads": spec.heads * spec.head_dim}

        def cut(name: str, chosen: slice, repeated: tuple[int, ...], stored: str | None = None) -> TensorRule:
            sizes = parts[chosen]
            names = [f"{spec.prefix}{name}"] * len(sizes)
            return tensors(*names, along="columns", sizes=sizes, repeated=repeated, stored=stored)

        def rule(name: str) -> TensorRule:
            return tensors(f"{spec.prefix}{name}")

        def rows(name: str, stored: str, rule: TensorRule, columns: int) -> nnx.Param[Array]:
            return make.scale(f"mamba.{name}", groups | {stored: columns}, rule, kv_replicas=replicas)

        every, mixed = slice(0, 5), slice(1, 4)
        columns = groups | {"columns": sum(parts)}
        first, channels = cut("in_proj.weight", every, (2, 3)), sum(parts[mixed])
        self.in_kernel = make.kernel("mamba.in_kernel", hidden, columns, first, kv_replicas=replicas)
        self.in_bias = (
            make.bias("mamba.in_bias", columns, cut("in_proj.bias", every, (2, 3)), kv_replicas=replicas)
            if spec.bias
            else None
        )
        self.convolution = make.scale(
            "mamba.convolution",
            {"taps": spec.taps, **groups, "columns": channels},
            cut("conv1d.weight", mixed, (1, 2), "(groups columns) () taps"),
            kv_replicas=replicas,
        )
        bias = cut("conv1d.bias", mixed, (1, 2))
        self.convolution_bias = rows("convolution_bias", "columns", bias, channels) if spec.convolution_bias else None
        self.rate = rows("rate", "group", tensors(f"{spec.prefix}A_log", transform=minus_exp), each)
        self.dt_bias = rows("dt_bias", "group", rule("dt_bias"), each)
        self.skip = rows("skip", "group", rule("D"), each)
        has_norm = spec.norm is not GatedNorm.NONE
        self.norm = rows("norm.scale", "columns", rule("norm.weight"), wide) if has_norm else None
        self.out_kernel = make.kernel("mamba.out_kernel", heads, hidden, rule("out_proj.weight"), last=True)
        self.out_bias = make.bias("mamba.out_bias", hidden, rule("out_proj.bias")) if spec.output_bias else None
        self.spec, self.axis, self.devices, self.eps = spec, make.axis, make.devices, partition.model.rms_norm_eps
        self.is_spread = replicas > 1

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        slots = slots_of(x, cache, place, step, self.spec.cached, self.devices)
        flat = x.reshape(-1, x.shape[-1])
        parts = linear(flat, self.in_kernel, self.in_bias, step.adapters)
        if self.spec.scales:
            parts = scaled(parts, np.repeat(np.array(self.spec.scales, np.float32), self.parts)[None, None])
        gate, mixed, dt = jnp.split(parts, np.cumsum([self.parts[0], sum(self.parts[1:4])]), axis=-1)
        weights = self.convolution[...].reshape(self.spec.taps, -1)
        bias = None if self.convolution_bias is None else self.convolution_bias[...].reshape(-1)
        windows, convolved = convolve(slots.table, slots.windows, mixed.reshape(len(flat), -1), weights, bias)
        inputs = self._inputs(self.spec.activation(convolved).astype(x.dtype).reshape(mixed.shape), dt)
        stored, read = scan_rows(StateSpace(), slots.table, slots.stored, inputs)
        skipped = inputs.x.astype(jnp.float32) * self.skip[...][None, ..., None]
        gated = self._gated(read.reshape(gate.shape) + skipped.reshape(gate.shape), gate).astype(x.dtype)
        out = linear(gated.reshape(*x.shape[:-1], -1), self.out_kernel, self.out_bias, step.adapters, self.axis)
        return None if cache is None else slots._replace(windows=windows, stored=stored).cache, out

    def _inputs(self, mixed: Array, dt: Array) -> StateSpaceInputs:
        """``mixed`` is f[T, groups, columns] behind the convolution, ``dt`` f[T, groups, each]."""
        x, b, c = jnp.split(mixed, np.cumsum(self.parts[1:3]), axis=-1)
        time = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...][None])
        time = jnp.clip(time, np.float32(self.spec.least_dt), np.float32(self.spec.most_dt))
        return StateSpaceInputs(x.reshape(*dt.shape, -1), b, c, time, self.rate[...][None] * time)

    def _gated(self, x: Array, gate: Array) -> Array:
        """f32[T, groups, columns], gated, and each group normed."""
        gates = jax.nn.silu(gate.astype(jnp.float32))
        if self.norm is None:
            return x * gates
        if self.spec.norm is GatedNorm.BEFORE:
            return self._normed(x, self.norm[...]) * gates
        return self._normed(x * gates, self.norm[...])

    def _normed(self, x: Array, scale: Array) -> Array:
        mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        if self.is_spread and self.axis is not None:
            mean = jax.lax.pmean(mean, self.axis)
        return x * jax.lax.rsqrt(mean + self.eps) * scale[None]
