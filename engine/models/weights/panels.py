"""The CPU's own matrix product, over weights in panels."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register

SOURCE = Path(__file__).parent.parent / "cpu" / "linear.cc"


@cache
def panel_width() -> int:
    """Columns of a panel on this machine. Registers the kernel. Raises KernelsUnavailable."""
    library = load(SOURCE)
    register(library, "odriver_linear")
    return int(library.odriver_panel_width())


def panels_shape(rows: int, depth: int) -> tuple[int, int, int]:
    """The shape of so many rows as panels. Raises KernelsUnavailable."""
    return -(-rows // panel_width()), depth, panel_width()


def as_panels(rows: np.ndarray[Any, Any]) -> Array:
    """[out, in] -> panels [ceil(out / width), in, width], zero-padded. Raises KernelsUnavailable.

    A step then reads each weight once and in order, whatever its shape.
    """
    width = panel_width()
    padded = np.pad(rows, ((0, -len(rows) % width), (0, 0))) if len(rows) % width else rows
    panels: Array = jax.device_put(np.ascontiguousarray(padded.reshape(-1, width, padded.shape[1]).transpose(0, 2, 1)))
    return panels


def product(x: Array, panels: Array, out: int, scales: Array) -> Array:
    """f[..., in] @ panels of ``out`` columns, scaled by f32[out] or f32[0] -> f32[..., out]."""
    call = jax.ffi.ffi_call("odriver_linear", jax.ShapeDtypeStruct((*x.shape[:-1], out), np.float32))
    multiplied: Array = call(x.astype(np.float32), panels, scales)
    return multiplied


def rows(panels: Array, places: Array) -> Array:
    """Rows f32[..., in] at i32[...] indices of an array in panels."""
    width = panels.shape[2]
    found: Array = panels[places // width, :, places % width]
    return found.astype(np.float32)
