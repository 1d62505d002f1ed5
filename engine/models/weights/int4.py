"""Kernels in 4 bits, with a scale for each group of inputs of each output."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.mesh import DeviceMesh
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter
from engine.models.weights.weight_format import INT4, Layout, Leaf, WeightFormat, numbers_leaf

UINT8 = np.dtype(np.uint8)
GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale in 4 bits: the first of these that divides a device's inputs."""

FURTHEST = (-8.0, -9.0, -8.5, -7.0, 7.0, -6.0, 6.0, -5.0, 5.0, -4.0, 4.0)
"""Steps that the number of a group furthest from 0 may be; beyond -8 it is cut off."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["layout", "out"])
@dataclass(frozen=True)
class Int4:
    """A kernel of 4 bits, and a scale for each group of inputs of each output.

    XLA:TPU reads the 4 bits as they are, and widens and scales them within the product.
    """

    values: Any
    """s4[in, *out], or in panels u8."""
    scales: Any
    """[groups, *out] in the dtype of activations, or in panels f32."""
    layout: Layout
    out: tuple[int, ...]
    """The output axes of one device's part."""

    @classmethod
    def leaves(cls, parameter: Parameter, form: WeightFormat, devices: int) -> "Int4":
        """The shapes of a parameter in this form."""
        assert form.activations is not None
        values, groups = (
            numbers_leaf(parameter, INT4, form.layout),
            parameter.shape[0] // group_size(parameter, devices),
        )
        if form.layout is not Layout.PANELS:
            scales = Leaf((groups, *values.shape[1:]), form.activations, values.split)
            return cls(values, scales, form.layout, parameter.out(devices))
        count, depth, width = values.shape
        packed, scales = Leaf((count, depth, width // 2), UINT8), Leaf((count, groups, width), np.dtype(np.float32))
        return cls(packed, scales, form.layout, parameter.out(devices))

    @classmethod
    def made_of(cls, values: Array, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> "Int4":
        """The form of a parameter's ``values``; its outputs are one axis in a MATRIX layout."""
        leaves = cls.leaves(parameter, form, mesh.size)
        numbers, scales = quantize4(values, group_size(parameter, mesh.size))
        if form.layout is Layout.PANELS:
            numbers = panels.as_panels4(np.asarray(numbers).reshape(len(numbers), -1).T)
            scales = panels.as_panels(np.asarray(scales).reshape(len(scales), -1).T)
        else:
            numbers = mesh.laid(numbers.astype(INT4), *leaves.values.split)
            scales = mesh.laid(scales.astype(leaves.scales.dtype), *leaves.scales.split)
        return cls(numbers, scales, form.layout, parameter.out(mesh.size))

    def product(self, x: Array) -> Array:
        """x[..., in] -> f32[..., prod(out)]."""
        if self.layout is Layout.PANELS:
            return panels.product(x, self.values, math.prod(self.out), self.scales)
        inputs, groups = self.values.shape[0], self.scales.shape[0]
        numbers = self.values.reshape(groups, inputs // groups, -1).astype(x.dtype)
        scaled = numbers * self.scales.reshape(groups, 1, -1).astype(x.dtype)
        return jnp.matmul(x, scaled.reshape(inputs, -1), preferred_element_type=np.float32)


def group_size(parameter: Parameter, devices: int) -> int:
    """Inputs that share a scale in 4 bits; 0 if a device's cannot be cut into groups."""
    inputs = parameter.part(devices)[0]
    return next((size for size in GROUP_SIZES if inputs % size == 0), 0)


@partial(jax.jit, static_argnames="group")
def quantize4(values: Array, group: int) -> tuple[Array, Array]:
    """f[in, ...] -> i8 from -8 to 7, and scales f32[in / group, ...]; NaN makes its scale NaN.

    The number furthest from 0 becomes one of FURTHEST: that with the least squared error. What was
    in 4 bits with the same groups, and symmetric, is then what it was.
    """
    wide = values.astype(np.float32).reshape(-1, group, *values.shape[1:])
    furthest = jnp.take_along_axis(wide, jnp.argmax(jnp.abs(wide), axis=1, keepdims=True), axis=1)

    def rounded(scales: Array) -> Array:
        return jnp.clip(jnp.round(wide / jnp.where(scales == 0, np.float32(1), scales)), -8, 7)

    def try_next(best: tuple[Array, Array], steps: Array) -> tuple[tuple[Array, Array], None]:
        scales = furthest / steps
        error = jnp.square(rounded(scales) * scales - wide).sum(axis=1, keepdims=True)
        is_best = error < best[0]
        return (jnp.where(is_best, error, best[0]), jnp.where(is_best, scales, best[1])), None

    start = jnp.full_like(furthest, jnp.inf), furthest  # NaN stays
    (_, scales), _ = jax.lax.scan(try_next, start, jnp.asarray(FURTHEST, np.float32))
    return rounded(scales).astype(jnp.int8).reshape(values.shape), scales[:, 0]
