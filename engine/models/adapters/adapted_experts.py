"""Kernels of experts with adapters in slots beside them, one for each expert.

The two forms are those of engine/models/adapters/adapted.py. Beside experts as matrices all slots'
factors of an expert are side by side, so that its rows are one group, as they are for its kernel;
in panels each expert and slot is a group.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.models.adapters.adapted import AdapterRows, own_columns
from engine.models.weights import panels
from engine.models.weights.forms import Experts
from engine.models.weights.weight_format import Groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskedExperts:
    """Factors as kernels of experts, those of all slots side by side."""

    a: tuple[Any, ...]
    """For each part (gate and up) a form f[experts, in, slots * rank]."""
    b: tuple[Any, ...]
    """For each part a form f[experts, slots * rank, its outputs]."""

    def delta(self, x: Array, groups: Groups, rows: AdapterRows) -> Array:
        """f[rows, in] -> f32[rows, prod(out)], zeros for a row without an adapter."""
        deltas = []
        for a, b in zip(self.a, self.b, strict=True):
            low = a.grouped_product(x, groups)
            is_own = own_columns(rows.slots, low.shape[1], rows.num_slots)
            masked = jnp.where(is_own, low, np.float32(0)).astype(x.dtype)
            deltas.append(jnp.where(rows.slots[:, None] >= 0, b.grouped_product(masked, groups), np.float32(0)))
        return jnp.concatenate(deltas, axis=1)


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["outputs"])
@dataclass(frozen=True)
class GroupedExperts:
    """Each slot's factors in panels."""

    a: tuple[Array, ...]
    """For each part f[slots, experts, panels of rank, in, width]."""
    b: tuple[Array, ...]
    """For each part f[slots, experts, panels of its outputs, rank, width]."""
    outputs: int
    """Of each part."""

    def delta(self, x: Array, groups: Groups, rows: AdapterRows) -> Array:
        """f[rows, in] -> f32[rows, prod(out)], zeros for a row without an adapter."""
        experts = self.a[0].shape[1]
        count = rows.num_slots * experts
        group = jnp.where(rows.slots < 0, np.int32(count), rows.slots * np.int32(experts) + groups.experts)
        order = jnp.argsort(group)
        ends = jnp.searchsorted(group[order], jnp.arange(count, dtype=jnp.int32), side="right").astype(jnp.int32)
        sizes, unscaled = jnp.diff(ends, prepend=np.int32(0)), jnp.zeros((count, 0), np.float32)
        sorted_rows, deltas = x[order], []
        for a, b in zip(self.a, self.b, strict=True):
            flat_a, flat_b = a.reshape(count, *a.shape[2:]), b.reshape(count, *b.shape[2:])
            low = panels.grouped_product(sorted_rows, flat_a, sizes, b.shape[3], unscaled)
            deltas.append(panels.grouped_product(low, flat_b, sizes, self.outputs, unscaled))
        return jnp.concatenate(deltas, axis=1)[jnp.argsort(order)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedExperts:
    """Kernels [experts, in, *out], and for each slot an adapter of every expert's."""

    base: Experts
    factors: MaskedExperts | GroupedExperts

    def grouped_product(self, x: Array, groups: Groups, rows: AdapterRows) -> Array:
        """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups."""
        return self.base.grouped_product(x, groups) + self.factors.delta(x, groups, rows)
