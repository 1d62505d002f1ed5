"""A mixture of experts: each token goes through few of many gated feed-forwards.

On several devices each has all columns of some experts, or some columns of all experts. Rows are
sorted by expert; those of other devices' experts and of padding come behind all groups, where no
expert reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.activation import Activation, ClampedGate
from engine.models.layers.expert_router import LIKELIEST, Router, RouterSpec
from engine.models.layers.feed_forward import GatedMLP, GatedSpec
from engine.models.layers.norm import RMSNorm
from engine.models.linear import grouped, linear
from engine.models.requirements import require
from engine.models.step_context import StepContext
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.forms import Experts
from engine.models.weights.parameters import LAYER, TensorRule, tensors
from engine.models.weights.weight_format import TILE, Groups

GATE_UP, DOWN = "mlp.experts.gate_up_kernel", "mlp.experts.down_kernel"
STACKED = "experts (gate_up ffn) hidden"
"""One tensor of all gates and ups, as transformers 5 and Granite have it."""


def one_by_one(prefix: str, gate: str, up: str, down: str) -> dict[str, TensorRule]:
    """Rules for tensors by expert, ``{prefix}{expert}.{gate}.weight`` and so on."""
    gate_up = (f"{LAYER}{prefix}{{experts}}.{name}.weight" for name in (gate, up))
    down = f"{LAYER}{prefix}{{experts}}.{down}.weight"
    return {GATE_UP: tensors(*gate_up, along="gate_up"), DOWN: tensors(down)}


def stacked(gate_up: str, down: str, *, stored: str = STACKED, down_stored: str | None = None) -> dict[str, TensorRule]:
    """Rules for one tensor of all experts each. ``stored`` are TensorRule's axes.

    gpt-oss has ``"experts hidden (ffn gate_up)"``, Llama 4 ``"experts hidden (gate_up ffn)"``, and
    both ``"experts ffn hidden"``; the default of ``down_stored`` is ``"experts hidden ffn"``.
    """
    return {
        GATE_UP: tensors(f"{LAYER}{gate_up}", stored=stored),
        DOWN: tensors(f"{LAYER}{down}", stored=down_stored),
    }


def or_else(rules: Mapping[str, TensorRule], others: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The rules, but for checkpoints whose experts are stored as by others."""
    return {name: replace(rule, otherwise=others[name]) for name, rule in rules.items()}


def or_one_by_one(rules: Mapping[str, TensorRule], prefix: str) -> dict[str, TensorRule]:
    """The rules, but for checkpoints in which llm-compressor has split the experts to quantise them."""
    return or_else(rules, one_by_one(prefix, "gate_proj", "up_proj", "down_proj"))


def gated(name: str, prefix: str) -> dict[str, TensorRule]:
    """Rules for the gated feed-forward ``name`` whose tensors are ``{prefix}.gate_proj.weight`` and so on."""
    gate, up, down = (f"{LAYER}{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {f"{name}.gate_up_kernel": tensors(gate, up, along="gate_up"), f"{name}.down_kernel": tensors(down)}


DEFAULT_TENSORS: Mapping[str, TensorRule] = one_by_one("mlp.experts.", "gate_proj", "up_proj", "down_proj")
"""As in Qwen, GLM and DeepSeek."""


@dataclass(frozen=True)
class ExpertsSpec:
    """The weighted sum of a token's experts, and of a shared one. A FeedForwardSpec.

    A family names tensors that differ by the names of parameters: ``one_by_one`` and ``stacked``
    are rules for the experts' kernels, and the router's and the shared expert's are where they
    are declared.
    """

    intermediate_size: int
    """The columns of one expert."""
    num_experts: int
    experts_per_token: int
    router: RouterSpec = LIKELIEST
    activation: Activation | ClampedGate = Activation.SILU
    bias: bool = False
    """Each expert has biases."""
    gated: bool = True
    """Else an expert is ``down(activation(up(x)))`` (Nemotron-H)."""
    shared: GatedSpec | None = None
    """Every token also goes through this one."""
    shared_gate: bool = False
    """It is multiplied by a sigmoid of the input (Qwen2-MoE)."""
    branch_norm_eps: float | None = None
    """If set, the shared expert and the others each have RMSNorms before and after, and the router
    sees the input before any norm (Gemma 4); the block has none before its feed-forward."""

    def __post_init__(self) -> None:
        """Raises UnsupportedError for numbers that do not go together."""
        self.router.check(self.num_experts, self.experts_per_token)
        require(self.shared is None or not self.shared.bias, "a shared expert with biases is not supported")
        is_plain = isinstance(self.activation, Activation) and not self.bias
        require(self.gated or is_plain, "experts without gates have no biases and no clamp")

    def splits_columns(self, devices: int) -> bool:
        """Whether devices split each expert's columns; else they split the experts.

        Of columns all read the same part, where else the one that has most of a step's experts is
        waited for. But a part of a tile is read whole, and XLA:TPU may lay such arrays out by
        inputs, and then copies them in each step.
        """
        return self.intermediate_size % (devices * TILE) == 0 or bool(self.num_experts % devices)

    def indivisible(self, devices: int) -> str | None:
        """See FeedForwardSpec."""
        if self.splits_columns(devices) and self.intermediate_size % devices:
            return f"the {self.num_experts} experts, nor their {self.intermediate_size} columns"
        return None if self.shared is None else self.shared.indivisible(devices)

    def scratch(self, hidden_size: int, devices: int) -> int:
        """See FeedForwardSpec. A device has a row for each of a token's experts, whoever has it."""
        columns = self.intermediate_size // (devices if self.splits_columns(devices) else 1)
        shared = 0 if self.shared is None else self.shared.scratch(hidden_size, devices)
        return self.experts_per_token * (3 * columns + 2 * hidden_size) + shared

    def build(self, hidden_size: int, make: ParameterFactory) -> "ExpertsMLP":
        """See FeedForwardSpec."""
        return ExpertsMLP(self, hidden_size, make)


class ExpertsMLP(nnx.Module):
    """Kernels: gate and up f[experts, hidden, 2, ffn], down f[experts, ffn, hidden]."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, make: ParameterFactory) -> None:
        self.spec, self.axis = spec, make.axis
        self.splits_columns = spec.splits_columns(make.devices)
        self.num_local = spec.num_experts // (1 if self.splits_columns else make.devices)
        self.router = Router(spec.router, hidden_size, spec.num_experts, spec.experts_per_token, make)
        whole = "experts" if self.splits_columns else "ffn"
        hidden, ffn, experts = {"hidden": hidden_size}, {"ffn": spec.intermediate_size}, {"experts": spec.num_experts}
        gate_up = {"gate_up": 1 + spec.gated, **ffn}

        def kernel(name: str, axes: Axes, *, last: bool) -> nnx.Param[Experts]:
            return make.experts(name, experts | {**axes}, DEFAULT_TENSORS[name], whole=whole, last=last)

        def bias(name: str, axes: Axes, stored: str) -> nnx.Param[Array] | None:
            rule = tensors(f"{LAYER}mlp.experts.{name}_proj_bias", stored=stored)
            return make.bias(f"mlp.experts.{name}_bias", experts | {**axes}, rule, whole=whole) if spec.bias else None

        self.gate_up_kernel = kernel(GATE_UP, hidden | gate_up, last=False)
        self.gate_up_bias = bias("gate_up", gate_up, "experts (gate_up ffn)")
        self.down_kernel = kernel(DOWN, ffn | hidden, last=True)
        self.down_bias = bias("down", hidden, "experts hidden")
        shared, gate = spec.shared, tensors(f"{LAYER}mlp.shared_expert_gate.weight")
        self.shared = GatedMLP(shared, hidden_size, make, "mlp.shared", "mlp.shared_expert") if shared else None
        self.shared_gate = (
            make.kernel("mlp.shared.gate_kernel", hidden, {"scores": 1}, gate, exact=True) if spec.shared_gate else None
        )
        self.norms = BranchNorms(hidden_size, spec.branch_norm_eps, make) if spec.branch_norm_eps is not None else None

    def __call__(self, x: Array, step: StepContext) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat, step.adapters)
        of_shared, of_experts = (flat, flat) if self.norms is None else self.norms.before(flat)
        parts = [self._experts(of_experts, weights, chosen, step).astype(x.dtype)]
        if self.shared is not None:
            parts.append(self._shared(self.shared, of_shared, step))
        parts = parts if self.norms is not None else [sum(parts[1:], parts[0])]
        parts = parts if self.axis is None else jax.lax.psum(parts, self.axis)
        if self.norms is not None:
            parts = self.norms.after(parts)
        return sum(parts[1:], parts[0]).reshape(x.shape)

    def _shared(self, shared: GatedMLP, x: Array, step: StepContext) -> Array:
        """f[tokens, hidden] -> f[tokens, hidden], this device's part."""
        part = shared.part(x, step)
        if self.shared_gate is None:
            return part
        gate = jax.nn.sigmoid(linear(x.astype(jnp.float32), self.shared_gate, None, step.adapters))
        return (part.astype(jnp.float32) * gate).astype(x.dtype)

    def _experts(self, x: Array, weights: Array, chosen: Array, step: StepContext) -> Array:
        """f[tokens, hidden] -> f32[tokens, hidden], this device's part of the weighted sum."""
        tokens, each = chosen.shape
        local = chosen - self._first()
        is_here = (local >= 0) & (local < self.num_local)
        if step.num_tokens is not None:
            is_here &= jnp.arange(tokens, dtype=jnp.int32)[:, None] < step.num_tokens
        place = jnp.where(is_here, local, self.num_local).reshape(-1)
        order = jnp.argsort(place)
        sizes = jax.nn.one_hot(place, self.num_local, dtype=jnp.int32).sum(axis=0)
        groups = Groups(sizes, jnp.minimum(place[order], self.num_local - 1))
        rows = x[order // each]
        if self.spec.router.weighs_input:
            rows = (rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]).astype(x.dtype)
            weights = jnp.ones_like(weights)
        computed = self._feed(rows, groups, _of_rows(step.adapters, is_here, order))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        by_token = computed[back].reshape(tokens, each, -1)
        return jnp.where(is_here[..., None], by_token * weights[..., None], np.float32(0)).sum(axis=1)

    def _feed(self, rows: Array, groups: Groups, adapters: AdapterRows | None) -> Array:
        """f[rows, hidden], sorted by expert -> f32[rows, hidden], undefined behind all groups."""
        activated = self._activated(grouped(rows, self.gate_up_kernel.get_value(), groups, adapters), groups)
        down = grouped(activated.astype(rows.dtype), self.down_kernel.get_value(), groups, adapters)
        if self.down_bias is None:
            return down
        bias = self.down_bias[...].astype(jnp.float32)[groups.experts]
        if self.axis is None or not self.splits_columns:
            return down + bias
        return down + jnp.where(jax.lax.axis_index(self.axis) == 0, bias, np.float32(0))  # once, before the sum

    def _activated(self, gate_up: Array, groups: Groups) -> Array:
        """f32[rows, columns of gate and up] -> f32[rows, columns]."""
        activation = self.spec.activation
        if not self.spec.gated and isinstance(activation, Activation):
            return activation(gate_up)
        columns = gate_up.shape[1] // 2
        # XLA:TPU would write [rows, 2, columns] anew where columns fill no whole tiles.
        gate, up = gate_up[:, :columns], gate_up[:, columns:]
        if self.gate_up_bias is not None:
            bias = self.gate_up_bias[...].astype(jnp.float32)
            gate, up = gate + bias[:, 0][groups.experts], up + bias[:, 1][groups.experts]
        return activation.gated(gate, up)

    def _first(self) -> Array | np.int32:
        """The first of this device's experts."""
        if self.axis is None or self.splits_columns:
            return np.int32(0)
        return jax.lax.axis_index(self.axis) * np.int32(self.num_local)


def _of_rows(adapters: AdapterRows | None, is_here: Array, order: Array) -> AdapterRows | None:
    """The adapters of rows that are sorted by expert: none behind all groups. bool[tokens, each] are those in groups."""
    if adapters is None:
        return None
    slots = jnp.where(is_here, adapters.slots[:, None], np.int32(-1)).reshape(-1)
    return AdapterRows(slots[order], adapters.num_slots)


class BranchNorms(nnx.Module):
    """The RMSNorms around the shared expert and around the others (Gemma 4)."""

    def __init__(self, hidden_size: int, eps: float, make: ParameterFactory) -> None:
        def norm(name: str, stored: str) -> RMSNorm:
            rule = tensors(f"{LAYER}{stored}.weight")
            return RMSNorm(f"mlp.{name}", {"hidden": hidden_size}, eps, rule, make)

        self.shared = norm("shared.norm", "pre_feedforward_layernorm")
        self.experts = norm("experts.norm", "pre_feedforward_layernorm_2")
        self.shared_post = norm("shared.post_norm", "post_feedforward_layernorm_1")
        self.experts_post = norm("experts.post_norm", "post_feedforward_layernorm_2")

    def before(self, x: Array) -> tuple[Array, Array]:
        """f[tokens, hidden] -> the inputs of the shared expert and of the others."""
        return self.shared(x), self.experts(x)

    def after(self, parts: list[Array]) -> list[Array]:
        """The outputs of the experts and of the shared one, f[tokens, hidden], normed."""
        experts, shared = parts
        return [self.experts_post(experts), self.shared_post(shared)]
