"""The CPU's own matrix product, over weights in panels."""

from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.models.cpu_libraries import LINEAR


@cache
def panel_width() -> int:
    """Columns of a panel on this machine. Registers the kernel. Raises KernelsUnavailable."""
    library = load(LINEAR)
    for name in ("odriver_linear", "odriver_grouped_linear"):
        register(library, name)
    return int(library.odriver_panel_width())


def panels_shape(rows: int, depth: int) -> tuple[int, int, int]:
    """The shape of so many rows as panels. Raises KernelsUnavailable."""
    return -(-rows // panel_width()), depth, panel_width()


def as_panels(rows: np.ndarray[Any, Any]) -> Array:
    """[..., out, in] -> panels [..., ceil(out / width), in, width], zero-padded.

    A step then reads each weight once and in order, whatever its shape. Raises KernelsUnavailable.
    """
    panels: Array = jax.device_put(in_panels(rows))
    return panels


def as_panels4(rows: np.ndarray[Any, Any]) -> Array:
    """Integers [..., out, in] from -8 to 7 -> panels u8[..., ceil(out / width), in, width / 2].

    A byte has column i of a panel in its lower bits and column i + width / 2 in its upper ones.
    """
    lower, upper = np.split(in_panels(rows).astype(np.uint8), 2, axis=-1)
    panels: Array = jax.device_put(lower & 15 | upper << 4)
    return panels


def in_panels(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``as_panels`` on the host."""
    width = panel_width()
    *lead, out, depth = rows.shape
    padded = np.pad(rows, [*[(0, 0)] * len(lead), (0, -out % width), (0, 0)]) if out % width else rows
    return np.ascontiguousarray(padded.reshape(*lead, -1, width, depth).swapaxes(-1, -2))


def product(x: Array, panels: Array, out: int, scales: Array) -> Array:
    """f[..., in] @ panels of ``out`` columns, scaled -> f32[..., out].

    ``scales`` are f32[out] for int8, f32[0] for floats, and for 4 bits themselves panels, of
    f32[out, groups]: a group is so many inputs as a power of two has, the last one what is left.
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
    """Rows f32[..., in] at i32[...] indices of an array in panels."""
    width = panels.shape[2]
    found: Array = panels[places // width, :, places % width]
    return found.astype(np.float32)
