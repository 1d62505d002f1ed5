"""New weights in the host's memory, and how they replace served ones.

All that can be wrong with them is found while they are staged, beside the steps and before
anything is written: so an update that is refused has changed nothing. Only what the devices need
is staged, in the layout of the first load, and written by its functions: nothing is compiled for a
whole parameter.
"""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.live.read_files import ReadCheckpoint
from engine.live.weight_source import Rereadable
from engine.memory.host_memory import available_bytes
from engine.models.decoder import Decoder
from engine.models.weights.forms import dense_leaf
from engine.models.weights.parameters import Parameter
from engine.models.weights.pieces import given
from engine.models.weights.placement import as_leaf, delete, device_indices, device_parts, fill, made_of, table_padding
from engine.models.weights.sources.fingerprint import fingerprint
from engine.models.weights.sources.tensor_source import TensorSource
from engine.models.weights.store import Served, matched, room
from engine.models.weights.weight_format import WeightFormat

LOWER, UPPER = np.uint8(15), np.uint8(240)
"""The bits of the two numbers of a byte."""


@dataclass(frozen=True)
class StagedParameter:
    """New numbers for a parameter of one layer."""

    entry: Served
    place: int
    """Of the layer in the entry's stack."""
    parts: list[NDArray[Any]]
    """Of each of this process's devices."""
    masks: list[NDArray[Any]] | None
    """Of the same shapes: 1 where there is a new number, and 0 elsewhere. None: all are new."""


@dataclass(frozen=True)
class StagedWeights:
    """New weights that have been read and found to be in order, in the host's memory."""

    number: int
    """By which all processes know them."""
    origin: str
    """The name of their source."""
    again: Rereadable | None
    """From where they can be read again."""
    fingerprint: int
    """Of their source: the same in all processes if these have the same files."""
    is_whole: bool
    """Whether they are all of the model's."""
    num_bytes: int
    num_tensors: int
    parameters: deque[StagedParameter]


def stage(
    number: int,
    source: TensorSource,
    decoder: Decoder,
    form: WeightFormat,
    mesh: DeviceMesh,
    again: Rereadable | None = None,
) -> StagedWeights:
    """Read what this process's devices need of a checkpoint's tensors.

    These are all of the model's if they can be read ``again``, and may be some of them if not. It
    reads shapes alone of the decoder, so any thread may do this. Raises ConfigurationError if a
    tensor is missing, unknown, misshapen, or holds NaN or infinity, and if the host has too little
    memory.
    """
    read, entries = matched(source, decoder, whole=again is not None)
    wanted = [
        (entry, place, layer)
        for entry, _ in entries
        for place, layer in enumerate(entry.sources)
        if any(name in read.names for name in entry.tensors(layer))
    ]
    if not wanted:
        raise ConfigurationError(f"{source.origin} has no tensor of the model")
    num_bytes = sum(_num_bytes(entry.parameter, form, mesh) for entry, _, _ in wanted)
    _check_memory(source.origin, num_bytes)
    staged = deque(_stage(read, entry, place, layer, form, mesh) for entry, place, layer in wanted)
    # Each of several hosts reads a bucket, or EasyDeL's arrays, by itself; one host has nobody to compare with.
    compared = fingerprint(source, of_numbers=isinstance(source, ReadCheckpoint) or jax.process_count() > 1)
    is_whole = len(wanted) == sum(len(entry.sources) for entry, _ in entries) and not any(new.masks for new in staged)
    return StagedWeights(number, source.origin, again, compared, is_whole, num_bytes, len(source.names), staged)


def write(staged: StagedWeights, decoder: Decoder, form: WeightFormat, mesh: DeviceMesh) -> None:
    """Replace a decoder's served arrays, one by one; no step may be in flight.

    The device holds one parameter of one layer beside the weights. It takes what it writes from
    ``staged``, so the host's memory shrinks meanwhile.
    """
    variables = dict(nnx.to_flat_state(nnx.state(decoder)))
    while staged.parameters:
        new = staged.parameters.popleft()
        variable = variables[new.entry.path]
        written = _written(new, variable.get_value(), form, mesh)
        variables[new.entry.path] = variable.replace(written)
        nnx.update(decoder, nnx.from_flat_state([(new.entry.path, variables[new.entry.path])]))


def _stage(
    source: TensorSource, entry: Served, place: int, layer: int | None, form: WeightFormat, mesh: DeviceMesh
) -> StagedParameter:
    parameter = entry.parameter
    parts = device_parts(source, parameter, layer, form, mesh)
    if not all(map(is_finite, parts)):
        raise ConfigurationError(_not_finite(source, entry.tensors(layer), dense_leaf(parameter, form).dtype))
    if all(name in source.names for name in entry.tensors(layer)):
        return StagedParameter(entry, place, parts, None)
    return StagedParameter(entry, place, parts, _masks(source, parameter, layer, form, mesh))


def _masks(
    source: TensorSource, parameter: Parameter, layer: int | None, form: WeightFormat, mesh: DeviceMesh
) -> list[NDArray[Any]]:
    """For each device's part, where there are new numbers, as they are laid out and in their dtype."""
    dtype, padding = dense_leaf(parameter, form).dtype, table_padding(parameter, form)
    masks = []
    for index in device_indices(parameter, mesh):
        mask = given(source.names, parameter, layer, index).astype(dtype)
        masks.append(as_leaf(np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, padding)]), parameter, form))
    return masks


def is_finite(numbers: NDArray[Any]) -> bool:
    """Whether no number is NaN or infinite."""
    if numbers.dtype == jnp.bfloat16:
        exponent = np.uint16(0x7F80)  # all of its bits are set in NaN and infinity
        return not bool(((numbers.view(np.uint16) & exponent) == exponent).any())
    return bool(np.isfinite(numbers).all())


def _not_finite(source: TensorSource, names: list[str], dtype: np.dtype[Any]) -> str:
    for name in names:
        if name in source.names:
            info = source.info(name)
            if not is_finite(source.read(name, (slice(None),) * len(info.shape)).astype(np.float32)):
                return f"{source.origin}: {name} holds NaN or infinity"
    return f"{source.origin}: {names[0]} has numbers that are too large for {dtype}"


def _check_memory(origin: str, num_bytes: int) -> None:
    available = available_bytes()
    if num_bytes > available:
        raise ConfigurationError(
            f"{origin}: these weights take {num_bytes:,} bytes of the host's memory, of which {available:,} are free: "
            "update some tensors at a time"
        )


def _num_bytes(parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> int:
    """Of all parts of this process's devices."""
    return dense_leaf(parameter, form).nbytes(mesh.size) * mesh.num_local


def _written(new: StagedParameter, served: Any, form: WeightFormat, mesh: DeviceMesh) -> Any:
    """The arrays of an entry with new numbers; the former ones are freed or donated."""
    entry = new.entry
    made = made_of(new.parts, entry.parameter, form, mesh)
    mask = None if new.masks is None else made_of(new.masks, entry.parameter, form, mesh)
    if not entry.is_stacked:
        if mask is not None:
            return jax.tree.map(_merged, served, made, mask)
        jax.tree.map(delete, served)
        return made
    place = np.int32(new.place)
    stacks = room(entry, served, form, mesh)
    if mask is not None:
        made = jax.tree.map(partial(_merged_in_stack, place=place), stacks, made, mask)
    return jax.tree.map(partial(fill, place=place), stacks, made)


@jax.jit
def _merged(served: Array, new: Array, mask: Array) -> Array:
    """The new numbers where those of the mask are not 0, which was quantised as the numbers were.

    A number and its scale belong to one output, and so to one tensor: both are new, or neither.
    """
    if served.dtype != np.uint8:
        return jnp.where(mask != 0, new, served)
    nothing = np.uint8(0)
    bits = jnp.where(mask & LOWER != 0, LOWER, nothing) | jnp.where(mask & UPPER != 0, UPPER, nothing)
    merged: Array = new & bits | served & ~bits
    return merged


@jax.jit
def _merged_in_stack(stack: Array, new: Array, mask: Array, place: Array) -> Array:
    served = jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)
    merged: Array = _merged(served, new, mask)
    return merged
