"""How a backend's steps have weights in memory, and the arrays that follow from it."""

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import TP
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter, Role

INT4 = np.dtype(jnp.int4)
TILE = 128
"""Columns of a TPU's tile."""


class Layout(Enum):
    """Memory layout of a kernel [in, *out] or table [vocab, hidden], for a backend's products."""

    AXES = auto()
    """As they are declared."""
    MATRIX = auto()
    """Kernels are [in, prod(out)], flattened for each device by itself, those of experts [experts,
    in, prod(out)]. A TPU stores the last two axes in tiles: it would pad small ones, and copy the
    kernel before each product. Tables have whole tiles of columns: see ``table_width``."""
    PANELS = auto()
    """For the CPU's own product, on one device: kernels, and tables as kernels [hidden, vocab]
    for logits, are in panels."""


@dataclass(frozen=True)
class WeightFormat:
    """The form in which a backend's steps read weights."""

    dtype: np.dtype[Any]
    """The dtype of weights that are not quantised; norm scales stay float32."""
    layout: Layout = Layout.AXES
    scans: bool = False
    """Repeated layers have one array per parameter, which ``lax.scan`` goes through."""
    activations: np.dtype[Any] | None = None
    """Kernels and tables are quantised, and rows of a table have this dtype; None: they are not."""
    bits: int = 8
    """Of quantised kernels; tables have 8."""
    least_expert_bits: int = 4
    """The fewest of kernels of experts: 8 where their product in 4 bits is at fault."""
    int8_products: frozenset[str] = frozenset()
    """Names of the kernels whose inputs are quantised in each product."""

    def has_int8_products(self, parameter: Parameter) -> bool:
        """Whether the inputs of a quantised parameter are as well."""
        return parameter.role is Role.KERNEL and parameter.name in self.int8_products


class Groups(NamedTuple):
    """Rows that are sorted by expert."""

    sizes: Array
    """i32[experts] rows of each expert; those behind all groups belong to none."""
    experts: Array
    """i32[rows] the expert of each row."""


@dataclass(frozen=True)
class Leaf:
    """The shape of one array of a form, over all devices, and the mesh axis of each axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    split: tuple[str | None, ...] = ()

    def nbytes(self, devices: int) -> int:
        """The bytes of one device's part."""
        whole = math.prod(self.shape) * (4 if self.dtype == INT4 else 8 * self.dtype.itemsize) // 8
        return whole // devices if TP in self.split else whole

    def stacked(self, layers: int) -> "Leaf":
        """The Leaf of a stack, ``layers`` first."""
        return Leaf((layers, *self.shape), self.dtype, (None, *self.split))


def stored_dtype(parameter: Parameter, form: WeightFormat) -> np.dtype[Any]:
    """The dtype of a parameter that is not quantised."""
    return np.dtype(np.float32) if parameter.exact else form.dtype


def numbers_leaf(parameter: Parameter, dtype: np.dtype[Any], layout: Layout) -> Leaf:
    """The array of a parameter's numbers in a layout."""
    shape, split, first = parameter.shape, parameter.served_split, parameter.role.lead + 1
    if layout is Layout.PANELS:
        is_table = parameter.role is Role.TABLE
        rows, depth = shape if is_table else (math.prod(shape[first:]), shape[first - 1])
        return Leaf((*shape[: first - 1], *panels.panels_shape(rows, depth, dtype)), dtype)
    if parameter.role is Role.TABLE:
        return Leaf((shape[0], table_width(shape[1], layout)), dtype, split)
    if layout is Layout.MATRIX and parameter.inputs:
        out = TP if TP in split[first:] else None
        return Leaf((*shape[:first], math.prod(shape[first:])), dtype, (*split[:first], out))
    return Leaf(shape, dtype, split)


def table_width(hidden: int, layout: Layout) -> int:
    """The columns of a table's array [vocab, columns]; behind ``hidden`` they are zeros.

    A table without whole tiles XLA:TPU would store by columns, and copy whole to find rows.
    """
    return -(-hidden // TILE) * TILE if layout is Layout.MATRIX else hidden


def as_laid_out(values: Array | NDArray[Any], parameter: Parameter, layout: Layout) -> Array:
    """A parameter's numbers [*axes] in a layout; MATRIX is how they come."""
    if layout is not Layout.PANELS:
        return jnp.asarray(values)
    numbers = np.asarray(values)
    if parameter.role is Role.TABLE:
        return panels.as_panels(numbers)
    inputs = numbers.shape[: parameter.role.lead + 1]
    return panels.as_panels(numbers.reshape(*inputs, -1).swapaxes(-1, -2))
