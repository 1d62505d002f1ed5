"""The forms of weights in service, and their operations: products, rows of a table, logits.

A form is a pytree with a class here. The class gives the shapes of its arrays (``leaves``), makes
them from a parameter's numbers (``made_of``) and has the operations of a step. ``form_of`` chooses
the form; models use it through ``engine.models.linear``.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.page_dtype import quantize
from engine.mesh import TP, DeviceMesh
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter, Role


class Layout(Enum):
    """Memory layout of a kernel [in, *out] or table [vocab, hidden], for a backend's products."""

    AXES = auto()
    """As they are declared."""
    MATRIX = auto()
    """Kernels are [in, prod(out)], flattened for each device by itself. A TPU stores the last
    two axes in tiles: it would pad small ones, and copy the kernel before each product."""
    PANELS = auto()
    """For the CPU's own product, on one device: kernels, and tables as kernels [hidden, vocab]
    for logits, are in panels."""


@dataclass(frozen=True)
class WeightFormat:
    """The form in which a backend's steps read weights."""

    dtype: np.dtype[Any]
    """Of all weights that are not quantised, except norm scales, which stay float32."""
    layout: Layout = Layout.AXES
    scans: bool = False
    """Repeated layers have one array per parameter, which ``lax.scan`` goes through."""
    activations: np.dtype[Any] | None = None
    """Kernels and tables are int8, and rows of a table have this dtype; None: no quantisation."""


@dataclass(frozen=True)
class Leaf:
    """The shape of one array of a form, over all devices, and the mesh axis of each axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    split: tuple[str | None, ...] = ()

    def nbytes(self, devices: int) -> int:
        """Of one device's part."""
        whole = math.prod(self.shape) * self.dtype.itemsize
        return whole // devices if TP in self.split else whole

    def stacked(self, layers: int) -> "Leaf":
        """Of so many layers."""
        return Leaf((layers, *self.shape), self.dtype, (None, *self.split))


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
        return cls(_numbers(parameter, form.dtype, form.layout), form.layout, _out(parameter, devices))

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Dense":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        return cls(_as_laid_out(values, parameter, form.layout), form.layout, _out(parameter, mesh.size))

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
        """Rows [..., hidden] of a table at i32[...] indices; float32 if the table is in panels."""
        if self.layout is Layout.PANELS:
            return _apart(panels.rows(self.values, places))
        return jnp.take(self.values, places, axis=0)


@partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["layout", "out", "activations"]
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
    """Of rows of a table."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Scaled":
        """The shapes of a parameter in this form."""
        assert form.activations is not None
        values, axis = _numbers(parameter, np.dtype(np.int8), form.layout), _contracted(parameter)
        whole = _numbers(parameter, np.dtype(np.float32), Layout.AXES if form.layout is Layout.PANELS else form.layout)
        split = () if form.layout is Layout.PANELS else _without(whole.split, axis)
        scales = Leaf(_without(whole.shape, axis), whole.dtype, split)
        return cls(values, scales, form.layout, _out(parameter, devices), form.activations)

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Scaled":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        assert form.activations is not None
        numbers, scales = _quantize(values, axis=_contracted(parameter))
        if form.layout is not Layout.PANELS:
            leaves = cls.leaves(parameter, form, mesh.size)
            numbers, scales = mesh.laid(numbers, *leaves.values.split), mesh.laid(scales, *leaves.scales.split)
        numbers = _as_laid_out(numbers, parameter, form.layout)
        return cls(numbers, scales, form.layout, _out(parameter, mesh.size), form.activations)

    def product(self, x: Array) -> Array:
        """x[..., in] -> f32[..., prod(out)]."""
        if self.layout is Layout.PANELS:
            return panels.product(x, self.values, math.prod(self.out), self.scales.reshape(-1))
        return self._times(_matmul(x, self.values))

    def logits(self, hidden: Array) -> Array:
        """f[..., hidden] by a table -> f32[..., vocab]."""
        if self.layout is Layout.PANELS:
            return self.product(hidden)
        return self._times(_transposed_matmul(hidden, self.values))

    def rows(self, places: Array) -> Array:
        """Rows [..., hidden] of a table at i32[...] indices."""
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
"""The forms of a kernel or table."""


def form_of(parameter: Parameter, form: WeightFormat) -> type[Weight] | None:
    """The form of a parameter; None for a vector, which is an array by itself."""
    if parameter.role is Role.VECTOR:
        return None
    return Dense if form.activations is None else Scaled


def leaves_of(parameter: Parameter, form: WeightFormat, devices: int) -> Any:
    """A parameter's form with a Leaf for each array."""
    kind = form_of(parameter, form)
    return dense_leaf(parameter, form) if kind is None else kind.leaves(parameter, form, devices)


def dense_leaf(parameter: Parameter, form: WeightFormat) -> Leaf:
    """The array of a parameter's numbers before they are quantised or put into panels."""
    dtype = np.dtype(np.float32) if parameter.exact else form.dtype
    return _numbers(parameter, dtype, Layout.MATRIX if form.layout is Layout.MATRIX else Layout.AXES)


def _numbers(parameter: Parameter, dtype: np.dtype[Any], layout: Layout) -> Leaf:
    shape, split = parameter.shape, parameter.served_split
    if layout is Layout.PANELS:
        is_table = parameter.role is Role.TABLE
        rows, depth = shape if is_table else (math.prod(shape[1:]), shape[0])
        return Leaf(panels.panels_shape(rows, depth), dtype)
    if layout is Layout.MATRIX and parameter.role is Role.KERNEL:
        return Leaf((shape[0], math.prod(shape[1:])), dtype, (split[0], TP if TP in split[1:] else None))
    return Leaf(shape, dtype, split)


def _as_laid_out(values: Array, parameter: Parameter, layout: Layout) -> Array:
    if layout is not Layout.PANELS:
        return values
    numbers = np.asarray(values)
    return panels.as_panels(numbers if parameter.role is Role.TABLE else numbers.reshape(len(numbers), -1).T)


def _out(parameter: Parameter, devices: int) -> tuple[int, ...]:
    part = parameter.part(devices)
    return part[:1] if parameter.role is Role.TABLE else part[1:]


def _contracted(parameter: Parameter) -> int:
    """The axis that a product sums over."""
    return 1 if parameter.role is Role.TABLE else 0


def _without(axes: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return (*axes[:axis], *axes[axis + 1 :])


_quantize = jax.jit(quantize, static_argnames="axis")


def _matmul(x: Array, values: Array) -> Array:
    matrix = values.reshape(values.shape[0], -1).astype(x.dtype)
    # For a result below float32 XLA:TPU would transpose the kernel.
    return jnp.matmul(x, matrix, preferred_element_type=np.float32)


def _transposed_matmul(hidden: Array, table: Array) -> Array:
    return jnp.matmul(hidden, table.astype(hidden.dtype).T, preferred_element_type=np.float32)


def _apart(rows: Array) -> Array:
    """Rows that XLA does not fuse with the next addition, as in the CPU's kernels."""
    apart: Array = jax.lax.optimization_barrier(rows)
    return apart
