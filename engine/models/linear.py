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
from engine.vocabulary import Vocabulary

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


class Scale(nnx.Param[Any]):
    """What an int8 kernel's outputs f32[*out], or an int8 table's rows f32[vocab], have to be multiplied by.

    ``axis`` of the kernel or table is what each number is for all of; ``is_flat`` where the kernel is, and
    ``activations`` is the dtype of what is looked up: fields of its metadata.
    """

    axis: int
    is_flat: bool
    activations: np.dtype


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


def scale_of(weight: nnx.Param[Array], axis: int, activations: np.dtype) -> Scale:
    """Room for the scales of a kernel (axis 0) or table (axis 1) that is to be int8."""
    outputs = jax.eval_shape(lambda: jnp.max(weight[...], axis=axis)).shape
    return Scale(
        jnp.zeros(outputs, np.float32), axis=axis, is_flat=isinstance(weight, FlatKernel), activations=activations
    )


def dense(
    x: Array,
    kernel: nnx.Param[Array],
    bias: nnx.Param[Array] | None,
    axis: str | None = None,
    scale: Scale | None = None,
) -> Array:
    """x[..., n] @ kernel[n, *out] + bias[*out]: contracts one axis and keeps the kernel's remaining ones.

    Where n is split over a mesh axis, the sum over it is taken too.
    """
    if isinstance(kernel, PackedKernel):
        out = kernel.out
        flat = _packed_product(x, kernel[...], math.prod(out), scale)
    else:
        weight = kernel[...]
        out = kernel.out if isinstance(kernel, FlatKernel) else weight.shape[1:]
        matrix = weight.reshape(weight.shape[0], -1).astype(x.dtype)
        flat = jnp.matmul(x, matrix, preferred_element_type=np.float32)  # asked for less, XLA:TPU would turn the kernel
        flat = _times(flat, scale)
    flat = flat.astype(x.dtype)
    whole = (flat if axis is None else jax.lax.psum(flat, axis)).reshape(*x.shape[:-1], *out)
    return whole if bias is None else whole + bias[...].astype(whole.dtype).reshape((1,) * (x.ndim - 1) + out)


def look_up(table: nnx.Param[Array], token_ids: Array, axis: str | None = None, scale: Scale | None = None) -> Array:
    """Rows [..., hidden] of a table [vocab, hidden], which may be split over a mesh axis; float32 where it is packed."""
    weight = table[...]
    if axis is not None:
        return _look_up_among(weight, scale, token_ids, Vocabulary(axis))
    if isinstance(table, PackedKernel):
        width = weight.shape[2]
        rows = weight[token_ids // width, :, token_ids % width].astype(np.float32)
        # Scaled apart from what is added next, as in the kernel.
        apart: Array = jax.lax.optimization_barrier(_scaled(rows, scale, token_ids))
        return apart
    return _scaled(_rows(weight, token_ids), scale, token_ids)


def logits(hidden: Array, table: nnx.Param[Array], scale: Scale | None = None) -> Array:
    """f[..., hidden] times a table [vocab, hidden] -> f32[..., vocab]."""
    if isinstance(table, PackedKernel):
        return _packed_product(hidden, table[...], math.prod(table.out), scale)
    return _times(jnp.matmul(hidden, table[...].astype(hidden.dtype).T, preferred_element_type=np.float32), scale)


def _look_up_among(part: Array, scale: Scale | None, token_ids: Array, vocabulary: Vocabulary) -> Array:
    """The rows that this device has, and those of the others by the sum."""
    size = part.shape[0]
    place = vocabulary.place(token_ids, size)
    here, place = place < size, jnp.minimum(place, np.int32(size - 1))
    rows = _scaled(_rows(part, place), scale, place)
    return vocabulary.total(jnp.where(here[..., None], rows, np.array(0, rows.dtype)))


def _rows(table: Array, places: Array) -> Array:
    """Rows [..., hidden] of a table. A single one of int8 XLA:TPU would cut from a copy of the whole, laid out for that."""
    if places.shape == (1,) and table.dtype == np.int8:
        return jnp.take(table, jnp.concatenate([places, jnp.zeros_like(places)]), axis=0)[:1]
    return jnp.take(table, places, axis=0)


def _scaled(rows: Array, scale: Scale | None, places: Array) -> Array:
    """Rows [..., hidden] that were at these places of a table."""
    if scale is None:
        return rows
    return (rows.astype(np.float32) * scale[...][places][..., None]).astype(scale.activations)


def _panels(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[out, in] -> [ceil(out / width), in, width]."""
    width = panel_width()
    padded = np.pad(rows, ((0, -len(rows) % width), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, width, padded.shape[1]).transpose(0, 2, 1))


def _times(product: Array, scale: Scale | None) -> Array:
    """f32[..., out], each output by its scale."""
    return product if scale is None else product * scale[...].reshape((1,) * (product.ndim - 1) + (-1,))


def _packed_product(x: Array, panels: Array, out: int, scale: Scale | None) -> Array:
    call = jax.ffi.ffi_call("odriver_linear", jax.ShapeDtypeStruct((*x.shape[:-1], out), np.float32))
    scales = jnp.zeros(0, np.float32) if scale is None else scale[...].reshape(-1)
    product: Array = call(x.astype(np.float32), panels, scales)
    return product
