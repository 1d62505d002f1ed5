"""Numbers of 8 bits with scales: for a whole tensor, its rows or blocks of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.published.quantised_tensor import in_chunks, read_scales, read_whole
from engine.models.weights.sources.tensor_source import TensorSource

FLOATS8 = ("F8_E4M3", "F8_E5M2")
Block = tuple[int, int]
"""Rows and columns of the last two axes that share a scale."""


@dataclass(frozen=True)
class ScaledTensor:
    """A QuantisedTensor of numbers with a scale for each block of them.

    A block may be all of the tensor, a row of its first axis, a row of its last one, or have a size
    for each axis.
    """

    source: TensorSource
    name: str
    scale_name: str
    scale_shape: tuple[int, ...]
    """With as many axes as the tensor."""
    block: tuple[int, ...]
    zero_name: str | None
    """Of whole numbers, one for each scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See QuantisedTensor."""
        return self.source.info(self.name).shape

    @property
    def parts(self) -> tuple[str, ...]:
        """See QuantisedTensor."""
        return (self.name, self.scale_name, *([self.zero_name] if self.zero_name else []))

    def read(self, index: tuple[slice, ...]) -> NDArray[np.float32]:
        """See QuantisedTensor."""
        numbers = self.source.read(self.name, index)
        scales = read_scales(self.source, self.scale_name).reshape(self.scale_shape)
        zeros = read_whole(self.source, self.zero_name).reshape(self.scale_shape) if self.zero_name else None
        values = np.empty(numbers.shape, np.float32)
        starts = [part.indices(size)[0] for part, size in zip(index, self.shape, strict=True)]

        def widen(rows: slice) -> None:
            part, begins = numbers[rows], (starts[0] + rows.start, *starts[1:])
            _widen8(np.ascontiguousarray(part), values[rows])
            if zeros is not None:
                values[rows] -= expanded(zeros, self.block, begins, part.shape)
            values[rows] *= expanded(scales, self.block, begins, part.shape)

        in_chunks(numbers.shape, widen)
        return values


@cache
def _pairs(dtype: np.dtype[Any]) -> NDArray[np.uint64]:
    """u64[65536]: of each two numbers of 8 bits the float32 numbers, the lower half first."""
    table = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.stack([np.tile(table, 256), np.repeat(table, 256)], axis=-1).view(np.uint64).reshape(-1)


def _widen8(numbers: NDArray[Any], to: NDArray[np.float32]) -> None:
    """Numbers of 8 bits as float32, by table: several times as fast as ``astype``."""
    if numbers.size % 2:
        to[...] = numbers
    else:
        pairs = numbers.reshape(-1).view(np.uint16)
        np.take(_pairs(numbers.dtype), pairs, out=to.reshape(-1).view(np.uint64), mode="clip")


def scaled_tensor(
    source: TensorSource, name: str, scale_name: str, blocks: Sequence[Block], zero_name: str | None = None
) -> ScaledTensor:
    """Raises ConfigurationError if the scales or zeros have a shape that does not fit."""
    shape, stored = source.info(name).shape, source.info(scale_name).shape
    if zero_name is not None and (source.info(zero_name).shape, source.info(zero_name).stored_as) != (stored, "I8"):
        raise ConfigurationError(f"{source.origin}: {zero_name} is not I8 {list(stored)}, as {scale_name} is")
    for fitted, size in _fits(shape, blocks):
        if len(stored) <= len(shape) and _stripped(stored) == _stripped(fitted):
            return ScaledTensor(source, name, scale_name, fitted, size, zero_name)
    words = "".join(f", nor blocks of {height} x {width}" for height, width in blocks)
    raise ConfigurationError(
        f"{source.origin}: {scale_name} has shape {list(stored)}, which are scales neither of all of {name} "
        f"{list(shape)} nor of its rows{words}"
    )


def _fits(shape: tuple[int, ...], blocks: Sequence[Block]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes that scales of a tensor may have, and the sizes of the blocks."""
    whole = tuple(max(1, size) for size in shape)
    sizes = [(1,) * len(shape[:-2]) + block for block in blocks if len(shape) > 1]
    sizes += [whole, (1, *whole[1:]), (1,) * len(shape[:-1]) + whole[-1:]]
    return [(tuple(-(-length // one) for length, one in zip(shape, size, strict=True)), size) for size in sizes]


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def expanded(
    scales: NDArray[Any], block: tuple[int, ...], begins: Sequence[int], shape: tuple[int, ...]
) -> NDArray[Any]:
    """The scale of each number of a part of a tensor; axes with a single scale have length 1."""
    places = [
        np.arange(begin, begin + size) // length if count > 1 else np.zeros(1, int)
        for begin, size, length, count in zip(begins, shape, block, scales.shape, strict=True)
    ]
    scales = scales[places[0][0] : places[0][-1] + 1]
    for axis in reversed(range(len(shape))):  # the last first, while there are few rows
        scales = scales.take(places[axis] - (places[0][0] if axis == 0 else 0), axis)
    return scales
