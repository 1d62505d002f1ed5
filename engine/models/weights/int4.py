"""Kernels in 4 bits, with a scale for each group of inputs of each output."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from engine.devices.mesh import DeviceMesh
from engine.models.tpu import experts_int4
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.weight_format import INT4, Groups, Layout, Leaf, WeightFormat, numbers_leaf

UINT8 = np.dtype(np.uint8)
GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale in 4 bits: the first of these that divides a device's inputs."""

FURTHEST = (-8.0, -9.0, -8.5, -7.0, 7.0, -6.0, 6.0, -5.0, 5.0, -4.0, 4.0)
"""Steps that the number of a group furthest from 0 may be; beyond -8 it is cut off."""
PARTS_OF_STEP = 1024
"""Errors are counted in these, so that the sum of a group's squares is exact: below 2**30, as none is off by more than
two steps and a part."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["layout", "out"])
@dataclass(frozen=True)
class Int4:
    """A kernel of 4 bits, and a scale for each group of inputs of each output.

    XLA:TPU reads the 4 bits as they are, and widens and scales them within the product.
    """

    values: Any
    """s4[in, *out] in a MATRIX layout, else in bytes: u8[in / 2, *out], or panels."""
    scales: Any
    """[groups, *out] in the dtype of activations, or in panels f32."""
    layout: Layout
    out: tuple[int, ...]
    """The output axes of one device's part."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Int4":
        """The shapes of a parameter in this form."""
        return cls(*_leaves(parameter, form, devices), form.layout, parameter.out(devices))

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Int4":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        sizes = (group_size(parameter, mesh.size),)
        return cls(*_made(quantize4, sizes, values, parameter, form, mesh), form.layout, parameter.out(mesh.size))

    def product(self, x: Array) -> Array:
        """x[..., in] -> f32[..., prod(out)]."""
        if self.layout is Layout.PANELS:
            return panels.product(x, self.values, math.prod(self.out), self.scales)
        groups, inputs = self.scales.shape[0], x.shape[-1]
        numbers = _numbers(self.values, axis=0).reshape(groups, inputs // groups, -1).astype(x.dtype)
        scaled = numbers * self.scales.reshape(groups, 1, -1).astype(x.dtype)
        return jnp.matmul(x, scaled.reshape(inputs, -1), preferred_element_type=np.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["layout", "out", "group"])
@dataclass(frozen=True)
class Int4Experts:
    """The same of several experts, which are the first axis. A TPU's product is our own kernel's."""

    values: Any
    """As in Int4, with experts."""
    scales: Any
    """As in Int4, with experts; in a MATRIX layout each device has whole tiles of groups."""
    layout: Layout
    out: tuple[int, ...]
    """As in Int4."""
    group: int
    """Inputs that share a scale."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Int4Experts":
        """The shapes of a parameter in this form."""
        group = group_size(parameter, devices)
        return cls(*_leaves(parameter, form, devices), form.layout, parameter.out(devices), group)

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Int4Experts":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        group = group_size(parameter, mesh.size)
        made = _made(_quantize_experts, (group, _tile_of(parameter, form)), values, parameter, form, mesh)
        return cls(*made, form.layout, parameter.out(mesh.size), group)

    def grouped_product(self, x: Array, groups: Groups, layer: Array | None = None) -> Array:
        """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups.

        If ``layer`` is given, the arrays are a stack of several layers', and that one's are read.
        """
        if self.layout is Layout.PANELS:
            return panels.grouped_product(x, self.values, groups.sizes, math.prod(self.out), self.scales)
        lead, first = 1, jnp.int32(0)
        if layer is not None:
            lead, first = 2, layer * np.int32(len(groups.sizes))
        shapes = ((-1, leaf.shape[lead], math.prod(self.out)) for leaf in (self.values, self.scales))
        values, scales = map(jnp.reshape, (self.values, self.scales), shapes)
        arguments = x, values, scales, groups.sizes, first
        plain = partial(_widened_product, group=self.group)
        if self.layout is Layout.AXES:
            return plain(*arguments)
        kernel = partial(experts_int4.grouped_product, group=self.group)
        product: Array = jax.lax.platform_dependent(*arguments, tpu=kernel, default=plain)
        return product


def _widened_product(x: Array, values: Array, scales: Array, sizes: Array, first: Array, *, group: int) -> Array:
    """As the TPU's kernel, by XLA, which writes the widened kernels of all experts."""
    experts, inputs, out = len(sizes), x.shape[1], values.shape[2]
    values, scales = (jax.lax.dynamic_slice_in_dim(each, first, experts) for each in (values, scales))
    wide = _numbers(values, axis=1).reshape(experts, -1, group, out).astype(x.dtype)
    kernels = wide * scales[:, : inputs // group, None].astype(x.dtype)
    return jax.lax.ragged_dot(x, kernels.reshape(experts, inputs, out), sizes, preferred_element_type=np.float32)


def has_groups(parameter: Parameter, form: WeightFormat, devices: int) -> bool:
    """Whether a kernel can be served in 4 bits."""
    group, is_expert = group_size(parameter, devices), parameter.role is Role.EXPERTS
    if form.bits != 4 or (is_expert and form.least_expert_bits > 4):
        return False
    return group % (experts_int4.INPUTS_OF_TILE if is_expert and form.layout is Layout.MATRIX else 1) == 0 < group


def _tile_of(parameter: Parameter, form: WeightFormat) -> int:
    """Groups that are stored together; the last may be filled up."""
    is_padded = parameter.role is Role.EXPERTS and form.layout is Layout.MATRIX
    return experts_int4.SCALES_OF_TILE if is_padded else 1


def _leaves(parameter: Parameter, form: WeightFormat, devices: int) -> tuple[Leaf, Leaf]:
    """The numbers and the scales."""
    assert form.activations is not None
    lead, values = parameter.role.lead, numbers_leaf(parameter, INT4, form.layout)
    inputs, each = parameter.shape[lead], parameter.part(devices)[lead]
    groups, tile = each // group_size(parameter, devices), _tile_of(parameter, form)
    if form.layout is not Layout.PANELS:
        groups = -(-groups // tile) * tile * (inputs // each)
        if form.layout is Layout.AXES:
            in_bytes = (*values.shape[:lead], inputs // 2, *values.shape[lead + 1 :])
            values = Leaf(in_bytes, UINT8, values.split)
        return values, Leaf((*values.shape[:lead], groups, *values.shape[lead + 1 :]), form.activations, values.split)
    *shape, width = values.shape
    packed = Leaf((*shape, width // 2), UINT8)
    return packed, Leaf((*shape[:-1], groups, panels.panel_width()), np.dtype(np.float32))


def _made(
    quantize: Callable[..., tuple[Array, Array]],
    sizes: tuple[int, ...],
    values: Array,
    parameter: Parameter,
    form: WeightFormat,
    mesh: DeviceMesh,
) -> tuple[Array, Array]:
    """The numbers and the scales of ``quantize(values, *sizes)``, as ``_leaves`` describes them."""
    lead = parameter.role.lead
    if form.layout is not Layout.PANELS:
        made: tuple[Array, Array] = _made_on_each(
            values, quantize, sizes, _leaves(parameter, form, mesh.size), lead, mesh
        )
        return made
    numbers, scales = (
        np.asarray(part).reshape(*part.shape[: lead + 1], -1).swapaxes(-1, -2) for part in quantize(values, *sizes)
    )
    return panels.as_panels4(numbers), panels.as_panels(scales)


@partial(jax.jit, static_argnames=("quantize", "sizes", "leaves", "lead", "mesh"))
def _made_on_each(
    values: Array,
    quantize: Callable[..., tuple[Array, Array]],
    sizes: tuple[int, ...],
    leaves: tuple[Leaf, Leaf],
    lead: int,
    mesh: DeviceMesh,
) -> tuple[Array, Array]:
    """Each device makes its own. Compiled once for parameters of the same shape, those of new weights included."""
    split = PartitionSpec(*leaves[0].split)

    def make(values: Array) -> tuple[Array, Array]:
        numbers, scales = quantize(values, *sizes)
        stored = _in_bytes(numbers, lead) if leaves[0].dtype == UINT8 else numbers.astype(INT4)
        return stored, scales.astype(leaves[1].dtype)

    made: tuple[Array, Array] = mesh.on_each(make, (split,), (split, split))(values)
    return made


def _in_bytes(numbers: Array, axis: int) -> Array:
    """Two consecutive i8 from -8 to 7 along an axis -> u8, the first in the lower bits.

    Off TPUs jax refuses arrays of int4 as arguments of what it has compiled ahead.
    """
    lower, upper = (jax.lax.slice_in_dim(numbers, first, None, 2, axis).astype(UINT8) for first in (0, 1))
    both: Array = lower & np.uint8(15) | upper << np.uint8(4)
    return both


def _numbers(values: Array, axis: int) -> Array:
    """Those of ``_in_bytes``, i8; int4 as it is."""
    if values.dtype == INT4:
        return values
    upper = values.astype(np.int8)
    both = jnp.stack([upper << np.int8(4), upper], axis=axis + 1) >> np.int8(4)
    return both.reshape(*values.shape[:axis], -1, *values.shape[axis + 1 :])


def group_size(parameter: Parameter, devices: int) -> int:
    """Inputs that share a scale in 4 bits; 0 if a device's cannot be cut into groups."""
    inputs = parameter.part(devices)[parameter.role.lead]
    return next((size for size in GROUP_SIZES if inputs % size == 0), 0)


@partial(jax.jit, static_argnames="group")
def quantize4(values: Array, group: int) -> tuple[Array, Array]:
    """f[in, ...] -> i8 from -8 to 7, and scales f32[in / group, ...]; NaN makes its scale NaN.

    The number furthest from 0 becomes one of FURTHEST: that with the least squared error. What was
    in 4 bits with the same groups, and symmetric, is then what it was. The choice does not depend on
    the order of a sum, which XLA chooses by the shape of a device's part.
    """
    wide = values.astype(np.float32).reshape(-1, group, *values.shape[1:])
    furthest = jnp.take_along_axis(wide, jnp.argmax(jnp.abs(wide), axis=1, keepdims=True), axis=1)

    def in_steps(scales: Array) -> tuple[Array, Array]:
        exact = wide / jnp.where(scales == 0, np.float32(1), scales)
        return exact, jnp.clip(jnp.round(exact), -8, 7)

    def try_next(best: tuple[Array, Array], steps: Array) -> tuple[tuple[Array, Array], None]:
        scales = furthest / steps
        exact, rounded = in_steps(scales)
        parts = jnp.round((exact - rounded) * np.float32(PARTS_OF_STEP)).astype(np.int32)
        squares = jnp.square(parts).sum(axis=1, keepdims=True, dtype=np.int32)
        error = squares.astype(np.float32) / jnp.square(steps)  # of the furthest number, squared
        is_best = error < best[0]
        return (jnp.where(is_best, error, best[0]), jnp.where(is_best, scales, best[1])), None

    start = jnp.full_like(furthest, jnp.inf), furthest  # NaN stays
    (_, scales), _ = jax.lax.scan(try_next, start, jnp.asarray(FURTHEST, np.float32))
    return in_steps(scales)[1].astype(jnp.int8).reshape(values.shape), scales[:, 0]


@partial(jax.jit, static_argnames=("group", "tile"))
def _quantize_experts(values: Array, group: int, tile: int) -> tuple[Array, Array]:
    """As quantize4 f[experts, in, ...], one by one, with zeros behind scales up to whole tiles."""
    numbers, scales = jax.lax.map(partial(quantize4, group=group), values)
    padding = [(0, 0)] * scales.ndim
    padding[1] = 0, -scales.shape[1] % tile
    return numbers, jnp.pad(scales, padding)
