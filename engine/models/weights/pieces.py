"""The tensors of a parameter's part, and how they are read."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.sources.tensor_source import TensorSource

SHARED = ("kv_heads", "groups")
"""The axes of which a device may have a copy, if there are fewer than devices."""


@dataclass(frozen=True)
class Piece:
    """The share of one tensor in a parameter."""

    tensor: str
    groups: tuple[tuple[str, ...], ...]
    """For each axis of the tensor, the parameter's axes that it joins."""
    sizes: Mapping[str, int]
    """The sizes of those axes in the parameter."""
    region: Mapping[str, slice | int]
    """Its index within the parameter along the axes that it does not fill."""
    repeats: int
    """Copies of each of its kv heads or groups in the parameter, one after the other."""
    shape: tuple[int, ...]
    """The shape of its part of the tensor: all of it, unless the tensor is cut."""
    begins: tuple[int, ...]
    """The start of that part in the tensor."""
    stored: tuple[int, ...]
    """The whole tensor's shape."""


def pieces(parameter: Parameter, layer: int | None) -> list[Piece]:
    """The pieces of a parameter in one layer, or outside of all layers."""
    found: dict[str, list[Piece]] = {}
    for number, template in enumerate(parameter.rule.tensors):
        for at in _indices(template, dict(parameter.axes)):
            copies = _copies(parameter, number)
            named = {name: index // copies if name in SHARED else index for name, index in at.items()}
            piece = _piece(parameter, number, template.format(layer=layer, **named), at)
            others = found.setdefault(piece.tensor, [])
            others.append(_after(others, piece))
    # the last piece of a tensor has the whole shape
    return [replace(piece, stored=others[-1].stored) for others in found.values() for piece in others]


def _indices(template: str, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All indices along the axes that are fields of a tensor's name."""
    named = [name for name in re.findall(r"\{(\w+)\}", template) if name != "layer"]
    for at in product(*(range(sizes[name]) for name in named)):
        yield dict(zip(named, at, strict=True))


def _piece(parameter: Parameter, number: int, tensor: str, at: dict[str, int]) -> Piece:
    """The rule's tensor of this number, as if it were not cut."""
    rule = parameter.rule
    along, count = rule.along, len(rule.tensors)
    sizes = {name: size for name, size in parameter.axes if name not in at}
    region: dict[str, slice | int] = dict(at)
    if along is not None:
        first = sizes[along] - count + 1
        start, sizes[along] = (first + number - 1, 1) if number else (0, first)
        if rule.sizes:
            start, sizes[along] = sum(rule.sizes[:number]), rule.sizes[number]
        region[along] = slice(start, start + sizes[along])
    groups = stored_axes(parameter, sizes)
    repeats = _copies(parameter, number)
    shape = tuple(math.prod(_stored_size(parameter, name, sizes[name], repeats) for name in group) for group in groups)
    return Piece(tensor, groups, sizes, region, repeats, shape, (0,) * len(groups), shape)


def _copies(parameter: Parameter, number: int) -> int:
    """How often the parameter has each kv head or group of the rule's tensor of this number."""
    repeated = parameter.rule.repeated
    return parameter.kv_replicas if (number > 0 if repeated is None else number in repeated) else 1


def _stored_size(parameter: Parameter, name: str, size: int, repeats: int) -> int:
    if name in SHARED:
        return size // repeats
    return size - parameter.padding if name == "vocabulary" else size


def _after(others: list[Piece], piece: Piece) -> Piece:
    """A piece after the others of the same tensor, along the fused axis; without such it is a copy."""
    along = [name for name, at in piece.region.items() if isinstance(at, slice)]
    if not others or not along:
        return piece
    (fused,) = along
    axis = next(number for number, group in enumerate(piece.groups) if fused in group)
    begin, end = others[-1].stored[axis], others[-1].stored[axis] + piece.shape[axis]
    begins, stored = list(piece.begins), list(piece.stored)
    begins[axis], stored[axis] = begin, end
    return replace(piece, begins=tuple(begins), stored=tuple(stored))


def stored_axes(parameter: Parameter, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """For each axis of a tensor, the parameter's axes that it joins, of those in ``sizes``."""
    if parameter.rule.stored is not None:
        words = re.findall(r"\(([^)]*)\)|(\w+)", parameter.rule.stored)
        return tuple(tuple((several or one).split()) for several, one in words)
    lead, outputs = parameter.role.lead, parameter.role.lead + parameter.inputs
    experts = tuple((name,) for name in parameter.names[:lead] if name in sizes)
    inputs = tuple(name for name in parameter.names[lead:outputs] if name in sizes)
    out = tuple(name for name in parameter.names[outputs:] if name in sizes)
    if parameter.role is Role.TABLE:
        return tuple((name,) for name in out)
    return (out,) if parameter.role is Role.VECTOR else (*experts, out, inputs)


def assemble(
    source: TensorSource,
    parameter: Parameter,
    layer: int | None,
    index: tuple[slice, ...],
    dtype: np.dtype[Any],
    padding: int = 0,
) -> NDArray[Any]:
    """The part of a parameter at ``index``, a slice per axis; a fused axis is always whole.

    It is zero where the source has no tensor, and in ``padding`` more along the last axis. In memory
    its axes have the order of the source's: numpy would take longer to reorder them than to read
    them, and ``jax.device_put`` does it in a fraction of the time.
    """
    windows = _windows(parameter, index)
    every = pieces(parameter, layer)
    found = [piece for piece in every if piece.tensor in source.names]
    sizes = {name: stop - start for name, (start, stop) in windows.items()}
    last = sizes[parameter.names[-1]]
    sizes[parameter.names[-1]] += padding
    make: Any = np.empty if len(found) == len(every) else np.zeros
    padded: NDArray[Any] | None = None
    for piece in found:
        region = _region(parameter, piece, windows)
        if region is None:
            continue
        block = _read(source, parameter, piece, windows)
        if padded is None:
            order = _order(parameter, piece, block)
            padded = make([sizes[name] for name in order], dtype)
            padded = padded.transpose([order.index(name) for name in parameter.names])
            padded[..., last:] = 0
        padded[..., :last][region] = block
    return np.zeros([*sizes.values()], dtype) if padded is None else padded


def _order(parameter: Parameter, piece: Piece, block: NDArray[Any]) -> list[str]:
    """The parameter's axes as a block of it has them in memory; those that it has not come first."""
    stored = {name for group in piece.groups for name in group}
    own = [name for name in parameter.names if name in stored]
    strides = dict(zip(own, block.strides, strict=True))
    return sorted(parameter.names, key=lambda name: -strides.get(name, math.inf))


def given(
    names: Collection[str], parameter: Parameter, layer: int | None, index: tuple[slice, ...]
) -> NDArray[np.bool_]:
    """Where ``assemble`` has numbers of these tensors: true or false for each of the part."""
    windows = _windows(parameter, index)
    mask = np.zeros([stop - start for start, stop in windows.values()], np.bool_)
    for piece in pieces(parameter, layer):
        region = _region(parameter, piece, windows)
        if piece.tensor in names and region is not None:
            mask[region] = True
    return mask


def _windows(parameter: Parameter, index: tuple[slice, ...]) -> dict[str, tuple[int, int]]:
    """By axis, where a part begins and ends."""
    axes = zip(parameter.axes, index, strict=True)
    return {name: (chosen.indices(size)[0], chosen.indices(size)[1]) for (name, size), chosen in axes}


def _region(
    parameter: Parameter, piece: Piece, windows: Mapping[str, tuple[int, int]]
) -> tuple[slice | int, ...] | None:
    """A piece's index within the part that the windows select; None if it is outside."""
    region = [_within(piece.region.get(name, slice(None)), windows[name]) for name in parameter.names]
    return None if None in region else tuple(at for at in region if at is not None)


def _within(at: slice | int, window: tuple[int, int]) -> slice | int | None:
    """An index of a parameter's axis within a window of it; None if it is outside."""
    if isinstance(at, slice):
        return at
    return at - window[0] if window[0] <= at < window[1] else None


@dataclass(frozen=True)
class _Extent:
    """The read along one axis of a tensor."""

    read: slice
    kept: int
    """Rows used of those read; a part of padding alone reads a row for its shape, uses none."""
    wanted: int
    """Rows used, and the padding."""
    sizes: Mapping[str, int]
    """Sizes of the parameter's axes in the wanted rows, before kv heads or groups are repeated."""
    lead: str
    """The axis of these along which only the wanted part is read."""
    within: slice
    """The wanted part along it, after they are repeated."""


def _extent(piece: Piece, axis: int, windows: Mapping[str, tuple[int, int]]) -> _Extent:
    group, begin, length = piece.groups[axis], piece.begins[axis], piece.shape[axis]
    if not group:
        return _Extent(slice(0, 1), 1, 1, {}, "", slice(0, 1))
    lead = next((name for name in group if piece.sizes[name] > 1), group[0])
    start, stop = (0, piece.sizes[lead]) if lead in piece.region else windows[lead]
    repeats = piece.repeats if lead in SHARED else 1
    first, past = start // repeats, -(-stop // repeats)
    row = math.prod(piece.sizes[name] for name in group if name != lead)
    end = min(past * row, length)
    return _Extent(
        read=slice(begin + min(first * row, end - 1), begin + end),
        kept=max(0, end - first * row),
        wanted=(past - first) * row,
        sizes={name: past - first if name == lead else piece.sizes[name] for name in group},
        lead=lead,
        within=slice(start - first * repeats, stop - first * repeats),
    )


def _read(
    source: TensorSource, parameter: Parameter, piece: Piece, windows: Mapping[str, tuple[int, int]]
) -> NDArray[Any]:
    """The part of one tensor that the windows select, its axes in the parameter's order."""
    extents = [_extent(piece, axis, windows) for axis in range(len(piece.groups))]
    block = source.read(piece.tensor, tuple(extent.read for extent in extents))
    if parameter.rule.transform is not None:
        block = parameter.rule.transform(block.astype(np.float32))
    if any(extent.kept < extent.wanted for extent in extents):
        block = block[tuple(slice(extent.kept) for extent in extents)]
        block = np.pad(block, [(0, extent.wanted - extent.kept) for extent in extents])
    sizes = {name: size for extent in extents for name, size in extent.sizes.items()}
    block = block.reshape(tuple(sizes.values()))
    within = {extent.lead: extent.within for extent in extents}
    for axis, name in enumerate(sizes):
        if name in SHARED and piece.repeats > 1:
            block = np.repeat(block, piece.repeats, axis)
        chosen = within.get(name, slice(None) if name in piece.region else slice(*windows[name]))
        block = block[(slice(None),) * axis + (chosen,)]
    order = [name for name in parameter.names if name in sizes]
    return block.transpose([list(sizes).index(name) for name in order])
