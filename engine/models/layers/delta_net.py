"""A gated delta net (Yang et al. 2024): a state of keys and values, as Qwen3-Next has it."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.state.convolution import convolve
from caching.state.delta_rule import DeltaInputs, GatedDeltaRule
from caching.state.ragged import scan_rows
from caching.state.spec import StateArray
from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.activation import Activation
from engine.models.layers.mixer import State
from engine.models.layers.recurrent import FLOAT32, minus_exp, slots_of
from engine.models.layers.row_operations import norm_factor
from engine.models.linear import linear
from engine.models.partition import Partition
from engine.models.requirements import require
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors

LINEAR = f"{LAYER}linear_attn."


@dataclass(frozen=True)
class DeltaNetSpec:
    """Each key head serves equally many value heads. A MixerSpec."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution of queries, keys and values sees."""
    activation: Activation = Activation.SILU
    """Behind the convolution."""
    norm_eps: float | None = None
    """Of the norm of what a head reads, if it is not the model's."""
    beta_scale: float = 1.0
    """With 2 the state's eigenvalues are between -1 and 1 (Grazzi et al. 2024, arXiv:2411.12537)."""
    rotated: ClassVar[None] = None
    extras: ClassVar[None] = None

    def __post_init__(self) -> None:
        """Raises UnsupportedError for heads that cannot be grouped, and for a convolution of one token."""
        keys, values = self.key_heads, self.value_heads
        require(values % keys == 0, f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}")
        require(self.taps > 1, f"linear_conv_kernel_dim {self.taps} is not supported")

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Columns of a key head: its query and its key, and the values and gates of its group."""
        return self.key_dim, self.key_dim, self.group * self.value_dim, self.group * self.value_dim

    @property
    def rules_of_parts(self) -> dict[str, TensorRule]:
        """The rules of a checkpoint that has the parts one after the other, each of all heads."""
        qkv, z, b, a = (f"{LINEAR}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
        return {
            "delta_net.in_kernel": tensors(qkv, qkv, qkv, z, along="columns", sizes=self.parts),
            "delta_net.gates_kernel": tensors(b, a, along="columns", sizes=(self.group, self.group)),
        }

    @property
    def cached(self) -> State:
        """See MixerSpec."""
        channels = self.key_heads * sum(self.parts[:3])
        window = StateArray(((self.taps - 1) * channels,))
        q, v = StateArray((self.key_heads * self.key_dim,)), StateArray((self.value_heads * self.value_dim,))
        gate = StateArray((self.value_heads,), FLOAT32)
        of_token = StateArray((channels,)), q, q, v, gate, gate  # behind the first as DeltaInputs
        return State((window, StateArray((self.value_heads, self.key_dim, self.value_dim), FLOAT32)), of_token)

    def flops(self, tokens: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 7 * self.value_heads // devices * self.key_dim * self.value_dim

    def indivisible(self, devices: int) -> str | None:
        """See MixerSpec."""
        return f"the {self.key_heads} key heads of the delta net" if self.key_heads % devices else None

    def scratch(self, head_dim: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 4 * self.key_heads * sum(self.parts) // devices

    def build(self, partition: Partition, make: ParameterFactory) -> "DeltaNet":
        """See MixerSpec."""
        return DeltaNet(self, partition, make)


class DeltaNet(nnx.Module):
    """All that belongs to a key head is in one kernel, grouped so that it shards."""

    def __init__(self, spec: DeltaNetSpec, partition: Partition, make: ParameterFactory) -> None:
        hidden, heads = {"hidden": partition.model.hidden_size}, {"groups": spec.key_heads}
        own, taps, dims = {**heads, "group": spec.group}, {"taps": spec.taps}, {"head_dim": spec.value_dim}
        values = {"heads": spec.value_heads * spec.value_dim}

        def rule(name: str) -> TensorRule:
            return tensors(f"{LINEAR}{name}")

        self.in_kernel = make.kernel(
            "delta_net.in_kernel", hidden, heads | {"columns": sum(spec.parts)}, rule("in_proj_qkvz.weight")
        )
        self.gates_kernel = make.kernel(
            "delta_net.gates_kernel", hidden, heads | {"columns": 2 * spec.group}, rule("in_proj_ba.weight"), exact=True
        )
        self.convolution = make.scale(
            "delta_net.convolution",
            taps | heads | {"columns": sum(spec.parts[:3])},
            tensors(
                *[f"{LINEAR}conv1d.weight"] * 3,
                along="columns",
                sizes=spec.parts[:3],
                stored="(groups columns) () taps",
            ),
        )
        self.rate = make.scale("delta_net.rate", own, tensors(f"{LINEAR}A_log", transform=minus_exp))
        self.dt_bias = make.scale("delta_net.dt_bias", own, rule("dt_bias"))
        self.norm = make.scale("delta_net.norm.scale", dims, rule("norm.weight"))
        self.out_kernel = make.kernel("delta_net.out_kernel", values, hidden, rule("out_proj.weight"), last=True)
        self.spec, self.axis, self.devices = spec, make.axis, make.devices
        self.eps = spec.norm_eps or partition.model.rms_norm_eps

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        slots = slots_of(x, cache, place, step, self.spec.cached, self.devices)
        flat = x.reshape(-1, x.shape[-1])
        parts = linear(flat, self.in_kernel, None, step.adapters)
        mixed, gate = jnp.split(parts, [sum(self.spec.parts[:3])], axis=-1)
        weights = self.convolution[...].reshape(self.spec.taps, -1)
        windows, mixed = convolve(slots.table, slots.windows, mixed.reshape(len(flat), -1), weights, None)
        inputs = self._inputs(
            self.spec.activation(mixed).astype(x.dtype).reshape(*parts.shape[:2], -1), flat, step.adapters
        )
        stored, read = scan_rows(GatedDeltaRule(), slots.table, slots.stored, inputs)
        normed = self._normed(read, gate.reshape(read.shape)).astype(x.dtype)
        out = linear(normed.reshape(*x.shape[:-1], -1), self.out_kernel, None, step.adapters, self.axis)
        return None if cache is None else slots._replace(windows=windows, stored=stored).cache, out

    def _inputs(self, mixed: Array, flat: Array, adapters: AdapterRows | None) -> DeltaInputs:
        """``mixed`` is f[T, key_heads, columns] behind the convolution, ``flat`` f[T, hidden]."""
        q, k, v = jnp.split(mixed, np.cumsum(self.spec.parts[:2]), axis=-1)
        with jax.default_matmul_precision("highest"):
            gates = linear(flat.astype(jnp.float32), self.gates_kernel, None, adapters)
        beta, dt = jnp.split(gates, 2, axis=-1)
        decay = self.rate[...][None] * jax.nn.softplus(dt + self.dt_bias[...][None])
        written = jax.nn.sigmoid(beta) * np.float32(self.spec.beta_scale)
        return DeltaInputs(q, k, v.reshape(*beta.shape, -1), decay, written)

    def _normed(self, x: Array, gate: Array) -> Array:
        """f32[T, value_heads, value_dim], each head normed, and then gated."""
        return x * norm_factor(x, self.eps) * self.norm[...][None, None] * jax.nn.silu(gate.astype(jnp.float32))
