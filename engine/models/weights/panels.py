"""The CPU's own matrix product, over weights in panels."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import LINEAR

FLOAT32 = np.dtype(np.float32)
BITS = {np.dtype(np.int8): 8, np.dtype(jnp.int4): 4}
"""Of integers."""


@cache
def panel_width() -> int:
    """Columns of a panel on this machine. Registers the kernel. Raises KernelsUnavailable."""
    library = load(LINEAR)
    for name in ("odriver_linear", "odriver_grouped_linear"):
        register(library, name)
    return int(library.odriver_panel_width())


@cache
def inputs_together(bits: int) -> int:
    """Inputs of an output whose integers of 8 or 4 bits are side by side in a panel: 4 where
    activations are multiplied as integers too, else 1. Raises KernelsUnavailable.

    That is both with VNNI, and 4 bits with AVX2.
    """
    return int(load(LINEAR).odriver_inputs_together(bits))


def panels_shape(rows: int, depth: int, dtype: np.dtype[Any] = FLOAT32) -> tuple[int, int, int]:
    """The shape of so many rows of a dtype as panels. Raises KernelsUnavailable."""
    together = _together(dtype)
    return -(-rows // panel_width()), -(-depth // together), panel_width() * together


def as_panels(rows: np.ndarray[Any, Any]) -> Array:
    """[..., out, in] -> panels [..., ceil(out / width), in, width], zero-padded.

    A step then reads each weight once and in order, whatever its shape. Of integers they are [...,
    ceil(out / width), ceil(in / together), width * together], with ``inputs_together`` of each
    output side by side. Raises KernelsUnavailable.
    """
    panels: Array = jax.device_put(_in_panels(rows, _together(rows.dtype)))  # faster than numpy reorders
    return panels


def as_panels4(rows: np.ndarray[Any, Any]) -> Array:
    """i8[..., out, in] from -8 to 7 -> panels u8 of integers, in half as many bytes.

    A byte has column i of a panel in its lower bits and column i + width / 2 in its upper ones.
    """
    lower, upper = np.split(_in_panels(rows, inputs_together(4)).astype(np.uint8), 2, axis=-1)
    panels: Array = jax.device_put(lower & 15 | upper << 4)
    return panels


def in_panels(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``as_panels`` on the host."""
    return np.ascontiguousarray(_in_panels(rows, _together(rows.dtype)))


def _in_panels(rows: np.ndarray[Any, Any], together: int) -> np.ndarray[Any, Any]:
    width = panel_width()
    *lead, out, depth = rows.shape
    missing = -out % width, -depth % together
    padded = np.pad(rows, [*[(0, 0)] * len(lead), *((0, count) for count in missing)]) if any(missing) else rows
    apart = padded.reshape(*lead, -1, width, padded.shape[-1] // together, together).swapaxes(-2, -3)
    return apart.reshape(*apart.shape[:-2], -1)


def _together(dtype: np.dtype[Any]) -> int:
    return inputs_together(BITS[dtype]) if dtype in BITS else 1


def product(x: Array, panels: Array, out: int, scales: Array) -> Array:
    """f[..., in] @ panels of ``out`` columns, scaled -> f32[..., out].

    ``scales`` are f32[out] for int8, f32[0] for floats, and for 4 bits themselves panels, of
    f32[out, groups]: a group is so many inputs as a power of two from 16 on has, the last one what
    is left. For integers by VNNI each row of x is rounded to 23 bits of its largest number
    (engine/models/cpu/digits.h).
    """
    call = jax.ffi.ffi_call("odriver_linear", jax.ShapeDtypeStruct((*x.shape[:-1], out), np.float32))
    multiplied: Array = call(x.astype(np.float32), panels, scales)
    return multiplied


def grouped_product(x: Array, panels: Array, sizes: Array, out: int, scales: Array) -> Array:
    """As ``product``, each row of f[rows, in] by its expert's kernel -> f32[rows, out].

    ``panels`` and ``scales`` are those of all experts, which are their first axis. x is sorted by
    expert: i32[experts] ``sizes`` are the rows of each, and rows behind all become zero. An expert
    without rows is not read; ``jax.lax.ragged_dot`` on a CPU multiplies all rows by all experts.
    """
    call = jax.ffi.ffi_call("odriver_grouped_linear", jax.ShapeDtypeStruct((x.shape[0], out), np.float32))
    multiplied: Array = call(x.astype(np.float32), panels, scales, sizes)
    return multiplied


def rows(panels: Array, places: Array) -> Array:
    """Rows f32[..., in] at i32[...] indices of an array in panels; of integers with the zeros that
    were padded."""
    width = panel_width()
    found: Array = panels.reshape(*panels.shape[:2], width, -1)[places // width, :, places % width]
    return found.reshape(*places.shape, -1).astype(np.float32)
