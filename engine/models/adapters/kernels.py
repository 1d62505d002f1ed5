"""The kernels that may have adapters, and where an adapter's factors are beside them.

PEFT adapts the modules of a checkpoint: of a kernel that joins several (q, k and v) each has its
own ``a`` and ``b``. Both are declared as kernels of their own, ``a`` [in, rank] and ``b``
[rank, *out], whose tensors have the names of the modules' weights. So they are split over devices,
cut and repeated exactly as the weights are; most models split the others of them as well.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import TP
from engine.models.adapters.adapted import Adapted, Apart, Masked, Parts
from engine.models.adapters.slot_words import WORD, num_words, slot_words
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter, TensorRule
from engine.models.weights.pieces import assemble, pieces, stored_axes
from engine.models.weights.sources.tensor_source import TensorInfo
from engine.models.weights.store import Served
from engine.models.weights.weight_format import Layout, Leaf

RANK = "rank"


@dataclass(frozen=True)
class Factors:
    """A TensorSource of one factor of an adapter's modules, by the names of their weights.

    A module without an adapter has zeros.
    """

    arrays: Mapping[str, NDArray[Any]]
    origin: str = "an adapter"

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.arrays.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        array = self.arrays[name]
        return TensorInfo(array.shape, array.dtype)

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        if name in self.arrays:
            return self.arrays[name][index]
        return np.zeros([part.stop - part.start for part in index], np.float32)


class AdaptedWeight(Protocol):
    """A weight of a decoder's state that may have adapters."""

    @property
    def entry(self) -> Served:
        """The weight."""

    def names(self, layer: int | None) -> tuple[str, ...]:
        """The names that its factors have in a layer: of some, its adapter has ``block``."""

    def block(self, layer: int | None, a: Factors, b: Factors) -> list[NDArray[Any]]:
        """One layer of an adapter over all devices: one slot's part of ``leaves``."""

    def leaves(self, slots: int) -> list[Leaf]:
        """The arrays of so many slots, of all layers that the entry has."""

    @property
    def slot_axes(self) -> list[int]:
        """Of each array, the axis along which slots follow each other, counted from the end."""

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """The weight's form with all slots beside it; ``arrays`` are ``leaves``."""


@dataclass(frozen=True)
class WithSlots:
    """An entry of a decoder's state that may have adapters of ``rank``."""

    entry: Served
    rank: int
    devices: int
    dtype: np.dtype[Any]
    """Of the factors."""
    layout: Layout

    @property
    def parameter(self) -> Parameter:
        """The entry's kernel, or its kernels [experts, in, *out]."""
        return self.entry.parameter

    def of_all_layers(self, leaves: list[Leaf]) -> list[Leaf]:
        """From the arrays of a layer those of all layers that the entry has."""
        return [leaf.stacked(len(self.entry.sources)) for leaf in leaves] if self.entry.is_stacked else leaves


@dataclass(frozen=True)
class AdaptedKernel(WithSlots):
    """A kernel, beside which each of the modules that it joins has factors."""

    splits_all: bool = False
    """Whether ``a`` is split by inputs and ``b`` by outputs, however the kernel is
    (engine/models/adapters/split_residual.py)."""

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the weights that it joins, each once, with a field for the layer."""
        return tuple(dict.fromkeys(self.parameter.rule.tensors))

    @cached_property
    def parts(self) -> Parts:
        """The part of each of them."""
        first = self.parameter.inputs
        names, out = self.parameter.names[first:], self.parameter.out(self.devices)
        if len(self.modules) == 1:
            return Parts(0, out[:1])
        along = self.parameter.rule.along
        assert along is not None
        extents = list(self._extents(along).values())
        assert [start for start, _ in extents] == [0, *(stop for _, stop in extents[:-1])], "a module is in two pieces"
        return Parts(names.index(along), tuple(stop - start for start, stop in extents))

    def names(self, layer: int | None) -> tuple[str, ...]:
        """See AdaptedWeight."""
        return tuple(module.format(layer=layer) for module in self.modules)

    def shapes(self, layer: int | None) -> dict[str, tuple[int, int]]:
        """The stored shape [out, in] of each weight in a layer."""
        at = 1 if _is_reversed(self.parameter) else 0
        return {piece.tensor: (piece.stored[at], piece.stored[1 - at]) for piece in pieces(self.parameter, layer)}

    def block(self, layer: int | None, a: Factors, b: Factors) -> list[NDArray[Any]]:
        """One layer of an adapter over all devices: f[parts, rank, in], and each part's
        f[rank, prod(its outputs)] with the devices' outputs one after the other; or ``slot_words``.

        ``a`` has f[rank, in] and ``b`` f[out, rank].
        """
        low = [_over_devices(a, one, layer, self.devices, self.dtype) for one in self._a]
        index = self.parts.along + 1
        highs: list[list[NDArray[Any]]] = [[] for _ in self.modules]
        for high in _of_devices(b, self._b, layer, self.devices, self.dtype):
            cuts = np.cumsum(self.parts.sizes)[: len(self.modules) - 1]
            for part, cut in zip(highs, np.split(high, cuts, axis=index), strict=True):
                part.append(cut.reshape(self.rank, -1))
        joined = [np.concatenate(each, axis=1) for each in highs]
        stacked = np.stack([each.reshape(-1, self.rank).T for each in low])
        if self.layout is Layout.PANELS:
            return [slot_words(stacked, joined, *self.leaves(1)[0].shape[1:])]
        return [stacked, *joined]

    def leaves(self, slots: int) -> list[Leaf]:
        """The arrays of ``block`` for so many slots, of all layers that the entry has.

        They are f[parts, slots * rank, in] and f[slots * rank, prod(outputs)], or each slot's words.
        """
        parameter, rows = self.parameter, slots * self.rank
        split, out = parameter.served_split, parameter.out(1)
        inputs, outputs = (TP, TP) if self.splits_all else (split[0], TP if TP in split[1:] else None)
        if len(self.modules) == 1:
            sizes = [int(np.prod(out))]
        else:
            sizes = [int(np.prod(out)) // out[self.parts.along] * size for size in self.parts.sizes]
        if self.layout is Layout.PANELS:
            words = num_words(self.rank, parameter.shape[0], tuple(sizes), self.dtype)
            return [Leaf((slots, words), WORD)]
        leaves = [
            Leaf((len(self.modules), rows, parameter.shape[0]), self.dtype, (None, None, inputs)),
            *(Leaf((rows, size), self.dtype, (None, outputs)) for size in sizes),
        ]
        return self.of_all_layers(leaves)

    @property
    def slot_axes(self) -> list[int]:
        """See AdaptedWeight."""
        return [-2] * len(self.leaves(1))

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """See AdaptedWeight."""
        return Adapted(value, self.factors(arrays))

    def factors(self, arrays: tuple[Array, ...]) -> Masked | Apart:
        """All slots' factors, as a product has them."""
        first, *others = arrays
        return Apart(first, self.parts) if self.layout is Layout.PANELS else Masked(first, tuple(others), self.parts)

    @cached_property
    def _b(self) -> Parameter:
        """``b`` of all modules together."""
        parameter = self.parameter
        outputs = parameter.axes[parameter.inputs :]
        rule = replace(parameter.rule, stored=f"({' '.join(self._stored[0])}) {RANK}", otherwise=None)
        return replace(parameter, axes=((RANK, self.rank), *outputs), rule=rule, inputs=1)

    @cached_property
    def _a(self) -> list[Parameter]:
        """``a`` of each module."""
        parameter = self.parameter
        inputs, stored = parameter.axes[: parameter.inputs], f"{RANK} ({' '.join(self._stored[1])})"
        rules = [TensorRule((module,), stored=stored) for module in self.modules]
        axes = (*inputs, (RANK, self.rank))
        return [replace(parameter, axes=axes, rule=rule, kv_replicas=1) for rule in rules]

    @cached_property
    def _stored(self) -> tuple[tuple[str, ...], ...]:
        """The outputs and the inputs, in the order of the tensors' axes: PEFT's factors are of these in any case."""
        axes = stored_axes(self.parameter, dict(self.parameter.axes))
        return axes[::-1] if _is_reversed(self.parameter) else axes

    def _extents(self, along: str) -> dict[str, tuple[int, int]]:
        """Where each module begins and ends along an axis."""
        found: dict[str, tuple[int, int]] = {}
        for piece in pieces(self.parameter, 0):
            at = piece.region[along]
            assert isinstance(at, slice)
            start, _ = found.get(piece.tensor, (at.start, 0))
            found[piece.tensor] = start, at.stop
        return found


def whole_rank(rank: int) -> int:
    """A rank, rounded up to whole panels."""
    width = panels.panel_width()
    return -(-rank // width) * width


def is_linear(parameter: Parameter) -> bool:
    """Whether its tensors are [out, in], as those of torch's linear modules, or [in, out], as GPT-2's."""
    axes = stored_axes(parameter, dict(parameter.axes))
    inputs = set(parameter.names[: parameter.inputs])
    named = any(set(re.findall(r"\{(\w+)\}", name)) - {"layer"} for name in parameter.rule.tensors)
    return not named and parameter.rule.transform is None and len(axes) == 2 and inputs in map(set, axes)


def _is_reversed(parameter: Parameter) -> bool:
    """Whether the tensors of a linear module are [in, out]."""
    return set(stored_axes(parameter, dict(parameter.axes))[0]) == set(parameter.names[: parameter.inputs])


def _of_devices(
    source: Factors, parameter: Parameter, layer: int | None, devices: int, dtype: np.dtype[Any]
) -> list[NDArray[Any]]:
    """A factor's part on each device, or all of it once if they do not split it."""
    count = devices if TP in parameter.split else 1
    return [assemble(source, parameter, layer, _part(parameter, number, count), dtype) for number in range(count)]


def _over_devices(
    source: Factors, parameter: Parameter, layer: int | None, devices: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """f[in, rank] with the devices' inputs one after the other."""
    parts = _of_devices(source, parameter, layer, devices, dtype)
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


def _part(parameter: Parameter, number: int, count: int) -> tuple[slice, ...]:
    """The index of one of ``count`` devices' parts."""
    return tuple(
        slice(number * size // count, (number + 1) * size // count) if axis == TP else slice(0, size)
        for size, axis in zip(parameter.sizes, parameter.split, strict=True)
    )
