"""Whole numbers of 4 or 8 bits packed into int32, with scales and zeros for groups of inputs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.published.packings import Packing, Packings
from engine.models.weights.published.quantised_tensor import QuantisedTensor, in_chunks, read_scales, read_whole
from engine.models.weights.sources.tensor_source import TensorSource

WORD = 32
BITS = (4, 8)
WORDS = ".qweight"
"""What the name of a module's packed tensor ends in, by AWQ and by GPTQ."""


def unpack(words: NDArray[np.int32 | np.uint32], bits: int, order: Sequence[int] = ()) -> NDArray[np.uint8]:
    """32 bits [..., n] -> u8[..., n * 32 / bits], the lowest bits of a word first, or in an order."""
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)
    numbers = np.empty((*words.shape, WORD // bits), np.uint8)
    octets = words.view(np.uint8).reshape(*words.shape, WORD // 8)

    def spread(rows: slice) -> None:
        for place, number in enumerate(order or range(WORD // bits)):
            octet = octets[rows, ..., number // 2]
            numbers[rows, ..., place] = octet >> 4 if number % 2 else octet & 15

    in_chunks(numbers.shape, spread)
    return numbers.reshape(*words.shape[:-1], -1)


@dataclass(frozen=True)
class Zeros:
    """The zeros of groups, packed like the numbers or not; ``name`` is None if all are the same."""

    name: str | None = None
    packed_axis: int | None = None
    added: int = 0
    """To each as it is stored; in a word of packed ones with a carry, as it was taken away."""


@dataclass(frozen=True)
class PackedTensor:
    """A QuantisedTensor ``(number - zero) * scale`` of a module's weight [out, in].

    Raises ConfigurationError if a stored tensor has another shape or dtype.
    """

    source: TensorSource
    words: str
    scales: str
    zeros: Zeros
    bits: int
    shape: tuple[int, int]
    group: int
    """Inputs that share a scale."""
    packed_axis: int = 1
    """Of the stored words: the axis with several numbers in each."""
    transposed: bool = False
    """Whether words, scales and zeros are stored with the inputs first."""
    order: tuple[int, ...] = ()
    """The number within a word that is each of its outputs or inputs; none is in order."""
    indices: str | None = None
    """The group of each input, if they are not one after the other."""
    unread: tuple[str, ...] = ()
    """Other stored tensors of this one."""

    @property
    def parts(self) -> tuple[str, ...]:
        """See QuantisedTensor."""
        read = (self.words, self.scales, self.zeros.name, self.indices)
        return (*(name for name in read if name is not None), *self.unread)

    @property
    def groups(self) -> int:
        """The groups of an output."""
        return -(-self.shape[1] // self.group)

    def __post_init__(self) -> None:
        per, inputs = WORD // self.bits, self.shape[1]
        expected: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
            (self.words, self._packed(inputs, self.packed_axis, per), ("I32",)),
            (self.scales, self._packed(self.groups, None, per), ("F32", "F16", "BF16")),
        ]
        if self.zeros.name is not None:
            dtype = "I8" if self.zeros.packed_axis is None else "I32"
            expected.append((self.zeros.name, self._packed(self.groups, self.zeros.packed_axis, per), (dtype,)))
        if self.indices is not None:
            expected.append((self.indices, (inputs,), ("I32",)))
        for name, shape, dtypes in expected:
            info = self.source.info(name)
            if info.shape != shape or info.stored_as not in dtypes:
                raise ConfigurationError(
                    f"{self.source.origin}: {name} is {info.stored_as} {list(info.shape)}, but for {self.bits} bits of a "
                    f"weight {list(self.shape)} in groups of {self.group} it is {' or '.join(dtypes)} {list(shape)}"
                )

    def _packed(self, inputs: int, axis: int | None, per: int) -> tuple[int, ...]:
        """The stored shape of [out, inputs] with ``per`` numbers in a word along an axis."""
        shape = [inputs, self.shape[0]] if self.transposed else [self.shape[0], inputs]
        if axis is not None:
            shape[axis] = -(-shape[axis] // per)
        return tuple(shape)

    def read(self, index: tuple[slice, ...]) -> NDArray[np.float32]:
        """See QuantisedTensor. Computed as it is stored, as a kernel has its inputs first, too."""
        rows, columns = (slice(*part.indices(size)[:2]) for part, size in zip(index, self.shape, strict=True))
        numbers = self._read(self.words, (rows, columns), self.packed_axis)
        scales, zeros, groups = self._scales(rows), self._zeros(rows), self._groups(columns)
        values = np.empty(numbers.shape, np.float32)

        def each(of_groups: NDArray[np.float32], chunk: slice) -> NDArray[np.float32]:
            if self.transposed:
                return of_groups.take(groups[chunk], 0)
            return of_groups[chunk].take(groups, 1)

        def widen(chunk: slice) -> None:
            values[chunk] = numbers[chunk]
            values[chunk] -= each(zeros, chunk) if isinstance(zeros, np.ndarray) else np.float32(zeros)
            values[chunk] *= each(scales, chunk)

        in_chunks(numbers.shape, widen)
        return values.T if self.transposed else values

    def _groups(self, columns: slice) -> NDArray[np.integer[Any]]:
        """The group of each input."""
        if self.indices is None:
            return np.arange(columns.start, columns.stop) // self.group
        indices = read_whole(self.source, self.indices)
        if indices.min() < 0 or indices.max() >= self.groups:
            raise ConfigurationError(
                f"{self.source.origin}: {self.indices} has groups {indices.min()} to {indices.max()}, but there are "
                f"{self.groups}: download it again"
            )
        chosen: NDArray[np.integer[Any]] = indices[columns]
        return chosen

    def _scales(self, rows: slice) -> NDArray[np.float32]:
        """Those of the groups of some outputs, as they are stored."""
        scales = read_scales(self.source, self.scales)
        return scales[:, rows] if self.transposed else scales[rows]

    def _zeros(self, rows: slice) -> NDArray[np.float32] | int:
        """Like ``_scales``, or the one of all."""
        if self.zeros.name is None:
            return self.zeros.added
        index = rows, slice(0, self.groups)
        return self._read(self.zeros.name, index, self.zeros.packed_axis, self.zeros.added).astype(np.float32)

    def _read(self, name: str, index: tuple[slice, slice], axis: int | None, added: int = 0) -> NDArray[Any]:
        """[out, in] of a stored tensor, or [in, out], unpacked along one of its axes, and ``added``."""
        stored = index[::-1] if self.transposed else index
        if axis is None:
            return self.source.read(name, stored) + np.int16(added)
        per, along = WORD // self.bits, stored[axis]
        outer = slice(along.start // per, -(-along.stop // per))
        words = self.source.read(name, tuple(outer if axis == number else stored[number] for number in (0, 1)))
        if added:
            words = words.view(np.uint32) + np.uint32(added * ((2**WORD - 1) // (2**self.bits - 1)))
        numbers = unpack(words.T if axis == 0 else words, self.bits, self.order)
        numbers = numbers[:, along.start - outer.start * per : along.stop - outer.start * per]
        return numbers.T if axis == 0 else numbers


@dataclass(frozen=True)
class PackedFormat(ABC):
    """A Format, but for its description, of modules with a tensor that ends in WORDS."""

    packings: Packings

    @property
    def bits(self) -> int:
        """See Format."""
        return self.packings.usual.bits

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format. A module that has such a tensor and ought to be plain is left out: it has no weight."""
        modules = [name.removesuffix(WORDS) for name in source.names if name.endswith(WORDS)]
        return {
            f"{module}.weight": self._tensor(source, module, packing)
            for module in modules
            if (packing := self.packings.of(module)) is not None
        }

    @abstractmethod
    def _tensor(self, source: TensorSource, name: str, packing: Packing) -> PackedTensor:
        """The weight of a module in its packing."""


def matrix(source: TensorSource, name: str) -> tuple[int, int]:
    """The shape of a tensor of two axes. Raises ConfigurationError if it has others."""
    shape = source.info(name).shape
    if len(shape) != 2:
        raise ConfigurationError(f"{source.origin}: {name} has shape {list(shape)}, where packed weights have two axes")
    return shape[0], shape[1]
