"""A source of tensors, whatever has them; some of another under other names; and arrays in memory."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.sources.safetensors_header import DTYPES

HEAD = "lm_head.weight"
"""The table of logits of a checkpoint that does not tie it to that of embeddings."""
FLOATS = ("F32", "F16", "BF16")
"""The dtypes of tensors that are served as they are stored."""


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """One of ``safetensors_header.DTYPES``."""

    @property
    def nbytes(self) -> int:
        """Its bytes as it is stored."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_as(self) -> str:
        """Its dtype by the name of the safetensors format."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


class TensorSource(Protocol):
    """Tensors by their names in checkpoints."""

    @property
    def origin(self) -> str:
        """The name of this source in errors."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """A tensor's shape and dtype. Raises ConfigurationError for an unsupported dtype."""

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """Part of a tensor in its stored dtype (bfloat16 is that of ml_dtypes), which may be the file's own memory."""


@dataclass(frozen=True)
class RenamedTensors:
    """A TensorSource: some tensors of another, under other names."""

    source: TensorSource

    def renamed(self, name: str) -> str | None:
        """The name here of a tensor of ``source``; None if it is not here."""
        raise NotImplementedError

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Raises ConfigurationError for two tensors that have the same name here."""
        stored: dict[str, str] = {}
        for name in self.source.names:
            new = self.renamed(name)
            if new is not None and stored.setdefault(new, name) != name:
                raise ConfigurationError(
                    f"{self.origin}: {stored[new]} and {name} are the same tensor: leave one of them out"
                )
        return stored

    @property
    def origin(self) -> str:
        """See TensorSource."""
        return self.source.origin

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        return self.source.info(self._stored[name])

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        return self.source.read(self._stored[name], index)


@dataclass(frozen=True)
class Arrays:
    """A TensorSource of arrays in memory: weights just computed by another program."""

    arrays: Mapping[str, NDArray[Any]]
    origin: str = "arrays in memory"

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.arrays.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        array = self.arrays[name]
        return TensorInfo(array.shape, read_dtype(self.origin, name, array.dtype.name))

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        return self.arrays[name][index]


def read_dtype(origin: str, name: str, stored: str) -> np.dtype[Any]:
    """The dtype of a format's or numpy's name. Raises ConfigurationError if it is not read."""
    for known, dtype in DTYPES.items():
        if stored in (known, dtype.name):
            return dtype
    raise ConfigurationError(f"{origin}: {name} is stored as {stored}; supported are {', '.join(FLOATS)}")
