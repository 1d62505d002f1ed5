"""What all quantised formats share: what they are to the rest, and how their tensors are read."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from caching.cores import usable_cores
from engine.errors import ConfigurationError
from engine.models.weights.sources.tensor_source import FLOATS, TensorSource

SCALES = (*FLOATS, "F8_E8M0")
UNQUANTISED = 16
"""Bits of weights."""
ROWS_AT_ONCE = 2**18
"""Numbers that are widened together: they stay in a core's cache."""


class QuantisedTensor(Protocol):
    """A tensor stored as several: numbers of few bits, and their scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were not quantised."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The stored tensors."""

    def read(self, index: tuple[slice, ...]) -> NDArray[np.float32]:
        """The numbers that a part of it stands for. Raises ConfigurationError."""


class Format(Protocol):
    """One ``quant_method`` with its settings. Hashable."""

    @property
    def description(self) -> str:
        """For logs and status."""

    @property
    def bits(self) -> int:
        """Of most weights; UNQUANTISED where all are as they were."""

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """By the names that they have unquantised. Raises ConfigurationError for odd ones."""


def in_chunks(shape: tuple[int, ...], work: Callable[[slice], None]) -> None:
    """Do all rows of an array, about ROWS_AT_ONCE numbers at a time, on all cores of the host."""
    rows = max(1, ROWS_AT_ONCE // max(1, math.prod(shape[1:])))
    chunks = [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
    if len(chunks) < 2:
        list(map(work, chunks))
        return
    with ThreadPoolExecutor(usable_cores(), "widen") as pool:
        list(pool.map(work, chunks))


def read_whole(source: TensorSource, name: str) -> NDArray[Any]:
    """All of a tensor."""
    return source.read(name, (slice(None),) * len(source.info(name).shape))


def read_scales(source: TensorSource, name: str) -> NDArray[np.float32]:
    """All of a tensor of scales. Raises ConfigurationError if one of them is no number."""
    stored_as = source.info(name).stored_as
    if stored_as not in SCALES:
        raise ConfigurationError(f"{source.origin}: {name} is stored as {stored_as}; scales are {', '.join(SCALES)}")
    scales: NDArray[np.float32] = read_whole(source, name).astype(np.float32)
    if not np.isfinite(scales).all():
        raise ConfigurationError(f"{source.origin}: {name} has scales that are not finite: download it again")
    return scales


def companion(source: TensorSource, name: str, *candidates: str) -> str:
    """The first of the candidates that is there. Raises ConfigurationError."""
    for candidate in candidates:
        if candidate in source.names:
            return candidate
    raise ConfigurationError(
        f"{source.origin}: {name} is quantised, but there is no {' nor '.join(candidates)}: download it again"
    )


def companion_if_any(source: TensorSource, name: str, candidate: str, *, required: bool = False) -> str | None:
    """The candidate if it is there. Raises ConfigurationError if it is ``required`` and is not."""
    return companion(source, name, candidate) if required or candidate in source.names else None
