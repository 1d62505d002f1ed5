"""MXFP4, as gpt-oss has its experts: floats of 4 bits, 32 with a power of two as their scale.

The format is OCP's (Rouhani et al. 2023): e2m1 numbers and e8m0 scales, two numbers in a byte.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.published.quantised_tensor import Format, QuantisedTensor, companion, in_chunks
from engine.models.weights.sources.tensor_source import TensorSource

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
BIAS = 127
"""Of the exponents."""
NOT_A_NUMBER = 255
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1).view(np.uint64).reshape(-1)
"""u64[256]: the two float32 numbers of each byte, the lower half first."""


@dataclass(frozen=True)
class BlockedTensor:
    """A QuantisedTensor [experts, in, out], stored as [experts, out, in / 32, 16] bytes."""

    source: TensorSource
    blocks: str
    scales: str
    shape: tuple[int, int, int]

    @property
    def parts(self) -> tuple[str, ...]:
        """See QuantisedTensor."""
        return self.blocks, self.scales

    def read(self, index: tuple[slice, ...]) -> NDArray[np.float32]:
        """See QuantisedTensor."""
        experts, inputs, out = (slice(*part.indices(size)[:2]) for part, size in zip(index, self.shape, strict=True))
        groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        numbers = self.source.read(self.blocks, (experts, out, groups, slice(None)))
        exponents = self.source.read(self.scales, (experts, out, groups))
        if (exponents == NOT_A_NUMBER).any():
            raise ConfigurationError(f"{self.source.origin}: {self.scales} has scales that are no numbers")
        values = np.empty((*numbers.shape[:3], BLOCK), np.float32)
        pairs = values.view(np.uint64).reshape(-1, BLOCK // 2)
        numbers = np.ascontiguousarray(numbers).reshape(pairs.shape)  # of a part once, not for each chunk of it
        by_block = np.ldexp(np.float32(1), exponents.reshape(-1).astype(np.int32) - BIAS)

        def widen(rows: slice) -> None:
            np.take(PAIRS, numbers[rows], out=pairs[rows], mode="clip")
            values.reshape(-1, BLOCK)[rows] *= by_block[rows, None]

        in_chunks(pairs.shape, widen)
        whole = values.reshape(*values.shape[:2], -1)[..., inputs.start - groups.start * BLOCK :]
        return whole[..., : inputs.stop - inputs.start].transpose(0, 2, 1)


@dataclass(frozen=True)
class MXFP4:
    """A Format."""

    description: str = "MXFP4"
    bits: int = 4

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format."""
        names = [name.removesuffix(BLOCKS) for name in source.names if name.endswith(BLOCKS)]
        return {name: _tensor(source, name) for name in names}


def _tensor(source: TensorSource, name: str) -> BlockedTensor:
    blocks, scales = f"{name}{BLOCKS}", companion(source, name, f"{name}{SCALES}")
    shape = source.info(blocks).shape
    fits = len(shape) == 4 and shape[3] == BLOCK // 2 and source.info(scales).shape == shape[:3]
    if not fits or {source.info(part).stored_as for part in (blocks, scales)} != {"U8"}:
        raise ConfigurationError(
            f"{source.origin}: {blocks} has shape {list(shape)} and {scales} {list(source.info(scales).shape)}, but "
            f"MXFP4 is U8 [experts, out, in / {BLOCK}, {BLOCK // 2}] with U8 [experts, out, in / {BLOCK}]"
        )
    experts, out, groups, _ = shape
    return BlockedTensor(source, blocks, scales, (experts, groups * BLOCK, out))


def mxfp4(_config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``."""
    return MXFP4()
