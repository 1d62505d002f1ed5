"""Products of activations and weights: XLA's, or on a CPU those of a kernel of our own over packed weights."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from caching.cpu_kernels import load, register

SOURCE = Path(__file__).parent / "cpu" / "linear.cc"


class PackedKernel(nnx.Param[Any]):
    """A kernel [in, *out] as panels [ceil(out / width), in, width]: so many columns at a time, zeros behind the last.

    ``out`` is a field of its metadata. A step then reads each weight once and in order, whatever its shape.
    """

    out: tuple[int, ...]


class FlatKernel(nnx.Param[Any]):
    """A kernel [in, *out] as [in, prod(out)]; ``out``, of one device's part, is a field of its metadata.

    A TPU lays the last two axes out in tiles: it would pad small ones, and copy the whole kernel before each product.
    """

    out: tuple[int, ...]


@cache
def panel_width() -> int:
    """Columns of a panel on this machine; makes the kernel known to XLA. Raises KernelsUnavailable."""
    library = load(SOURCE)
    register(library, "odriver_linear")
    return int(library.odriver_panel_width())


def pack(kernel: nnx.Param[Array]) -> PackedKernel:
    """A kernel [in, *out] packed for this machine. Raises KernelsUnavailable."""
    weight = np.asarray(kernel[...])
    depth, out = weight.shape[0], weight.shape[1:]
    panels = _panels(weight.reshape(depth, -1).T)
    return PackedKernel(jax.device_put(panels), out=out)


def flatten(kernel: nnx.Param[Array], out: tuple[int, ...]) -> FlatKernel:
    """A kernel [in, *out] with its output axes as one; ``out`` are those of one device's part."""
    weight = kernel[...]
    return FlatKernel(weight.reshape(weight.shape[0], -1), out=out)


def pack_table(table: nnx.Param[Array]) -> PackedKernel:
    """A table [vocab, hidden] packed as the kernel [hidden, vocab] that makes logits of it."""
    weight = np.asarray(table[...])
    return PackedKernel(jax.device_put(_panels(weight)), out=weight.shape[:1])


def dense(x: Array, kernel: nnx.Param[Array], bias: nnx.Param[Array] | None, axis: str | None = None) -> Array:
    """x[..., n] @ kernel[n, *out] + bias[*out]: contracts one axis and keeps the kernel's remaining ones.

    Where n is split over a mesh axis, the sum over it is taken too.
    """
    if isinstance(kernel, PackedKernel):
        out = kernel.out
        flat = _packed_product(x, kernel[...], math.prod(out))
    else:
        weight = kernel[...]
        out = kernel.out if isinstance(kernel, FlatKernel) else weight.shape[1:]
        flat = jnp.matmul(x, weight.reshape(weight.shape[0], -1), preferred_element_type=x.dtype)
    whole = (flat if axis is None else jax.lax.psum(flat, axis)).reshape(*x.shape[:-1], *out)
    return whole if bias is None else whole + bias[...].astype(whole.dtype).reshape((1,) * (x.ndim - 1) + out)


def look_up(table: nnx.Param[Array], token_ids: Array, axis: str | None = None) -> Array:
    """Rows [..., hidden] of a table [vocab, hidden], which may be split over a mesh axis; float32 where it is packed."""
    weight = table[...]
    if axis is not None:
        return _look_up_among(weight, token_ids, axis)
    if isinstance(table, PackedKernel):
        width = weight.shape[2]
        return weight[token_ids // width, :, token_ids % width].astype(np.float32)
    return jnp.take(weight, token_ids, axis=0)


def logits(hidden: Array, table: nnx.Param[Array]) -> Array:
    """f[..., hidden] times a table [vocab, hidden] -> f32[..., vocab]."""
    if isinstance(table, PackedKernel):
        return _packed_product(hidden, table[...], math.prod(table.out))
    return jnp.matmul(hidden, table[...].T, preferred_element_type=np.float32)


def _look_up_among(part: Array, token_ids: Array, axis: str) -> Array:
    """The rows that this device has, and those of the others by the sum."""
    place = token_ids - jax.lax.axis_index(axis).astype(token_ids.dtype) * part.shape[0]
    here = (place >= 0) & (place < part.shape[0])
    rows = jnp.take(part, jnp.where(here, place, 0), axis=0)
    found: Array = jax.lax.psum(jnp.where(here[..., None], rows, np.array(0, rows.dtype)), axis)
    return found


def _panels(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[out, in] -> [ceil(out / width), in, width]."""
    width = panel_width()
    padded = np.pad(rows, ((0, -len(rows) % width), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, width, padded.shape[1]).transpose(0, 2, 1))


def _packed_product(x: Array, panels: Array, out: int) -> Array:
    call = jax.ffi.ffi_call("odriver_linear", jax.ShapeDtypeStruct((*x.shape[:-1], out), np.float32))
    return call(x.astype(np.float32), panels)
