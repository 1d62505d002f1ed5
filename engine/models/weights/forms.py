"""The forms of weights in service, and their operations: products, rows of a table, logits.

A form is a pytree with a class here. The class gives the shapes of its arrays (``leaves``), makes
them from a parameter's numbers (``made_of``) and has the operations of a step. ``form_of`` chooses
the form; models use it through ``engine.models.linear``.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.page_dtype import quantize
from engine.devices.mesh import DeviceMesh
from engine.models.weights import panels
from engine.models.weights.int4 import Int4, Int4Experts, has_groups
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.weight_format import (
    Groups,
    Layout,
    Leaf,
    WeightFormat,
    as_laid_out,
    numbers_leaf,
    stored_dtype,
)


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["layout", "out"])
@dataclass(frozen=True)
class Dense:
    """The numbers in a float dtype."""

    values: Any
    layout: Layout
    out: tuple[int, ...]
    """The output axes of one device's part: the shape of a product's last axis."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Dense":
        """The shapes of a parameter in this form."""
        return cls(
            numbers_leaf(parameter, stored_dtype(parameter, form), form.layout), form.layout, parameter.out(devices)
        )

    @classmethod
    def made_of(
        cls, values: Array | NDArray[Any], parameter: Parameter, form: WeightFormat, mesh: DeviceMesh
    ) -> "Dense":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        return cls(as_laid_out(values, parameter, form.layout), form.layout, parameter.out(mesh.size))

    def grouped_product(self, x: Array, groups: Groups) -> Array:
        """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups."""
        if self.layout is Layout.PANELS:
            unscaled = jnp.zeros((groups.sizes.shape[0], 0), np.float32)
            return panels.grouped_product(x, self.values, groups.sizes, math.prod(self.out), unscaled)
        return _ragged_matmul(x, self.values, groups)

    def product(self, x: Array) -> Array:
        """x[..., in] -> f32[..., prod(out)]."""
        if self.layout is Layout.PANELS:
            return panels.product(x, self.values, math.prod(self.out), jnp.zeros(0, np.float32))
        return _matmul(x, self.values)

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] by a table -> f32[..., vocab]."""
        if self.layout is Layout.PANELS:
            return self.product(hidden)
        return _transposed_matmul(hidden, self.values)

    def rows(self, places: Array) -> Array:
        """Rows [..., columns] of a table at i32[...] indices; float32 if the table is in panels."""
        if self.layout is Layout.PANELS:
            return _apart(panels.rows(self.values, places))
        return jnp.take(self.values, places, axis=0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["layout", "out", "activations", "int8_products"],
)
@dataclass(frozen=True)
class Scaled:
    """int8 numbers, and a scale f32 for each output of a kernel or row of a table."""

    values: Any
    scales: Any
    layout: Layout
    out: tuple[int, ...]
    """As in Dense."""
    activations: np.dtype[Any]
    """The dtype of rows of a table."""
    int8_products: bool = False
    """A kernel's products are of int8 numbers: its inputs are quantised first, each row by itself,
    so that a row's product does not depend on the others. Of inputs that are split over devices
    each device scales its own part."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Scaled":
        """The shapes of a parameter in this form."""
        assert form.activations is not None
        values, axis = numbers_leaf(parameter, np.dtype(np.int8), form.layout), _contracted(parameter)
        whole = numbers_leaf(
            parameter, np.dtype(np.float32), Layout.AXES if form.layout is Layout.PANELS else form.layout
        )
        split = () if form.layout is Layout.PANELS else _without(whole.split, axis)
        scales = Leaf(_without(whole.shape, axis), whole.dtype, split)
        return cls(
            values, scales, form.layout, parameter.out(devices), form.activations, form.has_int8_products(parameter)
        )

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Scaled":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        assert form.activations is not None
        numbers, scales = _quantize(values, axis=_contracted(parameter))
        if form.layout is not Layout.PANELS:
            leaves = cls.leaves(parameter, form, mesh.size)
            numbers, scales = mesh.laid(numbers, *leaves.values.split), mesh.laid(scales, *leaves.scales.split)
        numbers = as_laid_out(numbers, parameter, form.layout)
        return cls(
            numbers, scales, form.layout, parameter.out(mesh.size), form.activations, form.has_int8_products(parameter)
        )

    def grouped_product(self, x: Array, groups: Groups) -> Array:
        """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups."""
        scales = self.scales.reshape(-1, math.prod(self.out))
        if self.layout is Layout.PANELS:
            return panels.grouped_product(x, self.values, groups.sizes, math.prod(self.out), scales)
        scaled: Array = _ragged_matmul(x, self.values, groups) * scales[groups.experts]
        return scaled

    def product(self, x: Array) -> Array:
        """x[..., in] -> f32[..., prod(out)]."""
        if not self.int8_products:
            return self._multiplied(x)
        numbers, steps = quantize(x)
        return self._multiplied(numbers) * steps[..., None]

    def _multiplied(self, x: Array) -> Array:
        """f[..., in] or i8[..., in] -> f32[..., prod(out)]."""
        if self.layout is Layout.PANELS:
            return panels.product(x, self.values, math.prod(self.out), self.scales.reshape(-1))
        return self._times(_matmul(x, self.values))

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] by a table -> f32[..., vocab]."""
        if self.layout is Layout.PANELS:
            return self.product(hidden)
        return self._times(_transposed_matmul(hidden, self.values))

    def rows(self, places: Array) -> Array:
        """Rows [..., columns] of a table at i32[...] indices."""
        if self.layout is Layout.PANELS:
            return _apart(self._scaled(panels.rows(self.values, places), places))
        # For a single row XLA:TPU would copy the whole table to another layout.
        if places.shape == (1,):
            padded = jnp.concatenate([places, jnp.zeros_like(places)])
            return self._scaled(jnp.take(self.values, padded, axis=0)[:1], places)
        return self._scaled(jnp.take(self.values, places, axis=0), places)

    def _scaled(self, rows: Array, places: Array) -> Array:
        wide: Array = rows.astype(np.float32) * self.scales[places][..., None]
        return wide.astype(self.activations)

    def _times(self, product: Array) -> Array:
        """f32[..., out], each output by its scale."""
        scales: Array = self.scales.reshape((1,) * (product.ndim - 1) + (-1,))
        return product * scales


Weight = Dense | Scaled
"""The forms of a table."""
Experts = Weight | Int4Experts
"""The forms of kernels of experts."""
Kernel = Weight | Int4
"""The forms of other kernels."""


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "place"], meta_fields=[])
@dataclass(frozen=True)
class InStack:
    """The experts of one layer within a stack of several layers', which it does not copy.

    A product reads the experts that have rows: to the others, and to those of other layers, it
    gives groups of none.
    """

    stack: Experts
    """Its arrays are [layers, experts, ...]."""
    place: Array
    """i32[] of the layer."""

    @property
    def out(self) -> tuple[int, ...]:
        """As in Dense."""
        return self.stack.out

    def grouped_product(self, x: Array, groups: Groups) -> Array:
        """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups."""
        if isinstance(self.stack, Int4Experts):
            return self.stack.grouped_product(x, groups, self.place)
        layers, experts = self.stack.values.shape[:2]
        # Smaller arrays are cut: to find their rows, XLA:TPU would read those of all layers.
        cut = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=self.place, keepdims=False), self.stack)
        whole = replace(cut, values=self.stack.values.reshape(layers * experts, *self.stack.values.shape[2:]))
        nothing, first = jnp.zeros(layers * experts, jnp.int32), self.place * np.int32(experts)
        sizes = jax.lax.dynamic_update_slice(nothing, groups.sizes, (first,))
        product: Array = whole.grouped_product(x, Groups(sizes, groups.experts))
        return product


def form_of(parameter: Parameter, form: WeightFormat, devices: int) -> type[Kernel | Experts] | None:
    """The form of a parameter; None for a vector, which is an array by itself."""
    if parameter.role is Role.VECTOR:
        return None
    if form.activations is None or parameter.exact:
        return Dense
    if parameter.role is Role.TABLE or not has_groups(parameter, form, devices):
        return Scaled
    return Int4Experts if parameter.role is Role.EXPERTS else Int4


def leaves_of(parameter: Parameter, form: WeightFormat, devices: int) -> Any:
    """A parameter's form with a Leaf for each array."""
    kind = form_of(parameter, form, devices)
    return dense_leaf(parameter, form) if kind is None else kind.leaves(parameter, form, devices)


def dense_leaf(parameter: Parameter, form: WeightFormat) -> Leaf:
    """The array of a parameter's numbers before they are quantised or put into panels."""
    layout = Layout.MATRIX if form.layout is Layout.MATRIX else Layout.AXES
    return numbers_leaf(parameter, stored_dtype(parameter, form), layout)


def _contracted(parameter: Parameter) -> int:
    """The axis that a product sums over."""
    return 1 if parameter.role is Role.TABLE else parameter.role.lead


def _without(axes: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return (*axes[:axis], *axes[axis + 1 :])


_quantize = jax.jit(quantize, static_argnames="axis")


def _matmul(x: Array, values: Array) -> Array:
    """Sums are i32 of int8 rows, exact for up to 133,000 inputs, and else f32: for a result below
    float32 XLA:TPU would transpose the kernel."""
    matrix = values.reshape(values.shape[0], -1).astype(x.dtype)
    sums = np.int32 if x.dtype == np.int8 else np.float32
    return jnp.matmul(x, matrix, preferred_element_type=sums).astype(np.float32)


def _ragged_matmul(x: Array, values: Array, groups: Groups) -> Array:
    """XLA:TPU reads int8 ``values`` as they are; to convert them first would write them anew."""
    matrices = values.reshape(*values.shape[:2], -1)
    return jax.lax.ragged_dot(x, matrices, groups.sizes, preferred_element_type=np.float32)


def _transposed_matmul(hidden: Array, table: Array) -> Array:
    """f[..., hidden] by a table [vocab, columns], with zeros for the columns behind the hidden."""
    columns = table.shape[1] - hidden.shape[-1]
    wide = jnp.pad(hidden, [*[(0, 0)] * (hidden.ndim - 1), (0, columns)]) if columns else hidden
    return jnp.matmul(wide, table.astype(hidden.dtype).T, preferred_element_type=np.float32)


def _apart(rows: Array) -> Array:
    """Rows that XLA does not fuse with the next addition, as in the CPU's kernels."""
    apart: Array = jax.lax.optimization_barrier(rows)
    return apart
