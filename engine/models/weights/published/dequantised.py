"""A quantised checkpoint as a source of plain tensors."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.published.quantised_tensor import Format, QuantisedTensor
from engine.models.weights.sources.tensor_source import TensorInfo, TensorSource

UNREAD = re.compile(r".*\.(input|activation|output|[qkv]|kv)_(scale|zero_point)(_inv)?")
"""Tensors for quantised activations and pages, which are served in floats or scaled as they come."""


@dataclass(frozen=True)
class Dequantised:
    """A TensorSource of what the tensors of a quantised checkpoint stand for, part by part."""

    source: TensorSource
    format: Format

    @cached_property
    def _quantised(self) -> dict[str, QuantisedTensor]:
        """Raises ConfigurationError for a tensor that is there plain as well."""
        found = self.format.tensors(self.source)
        for name, tensor in found.items():
            if name in self.source.names and name not in tensor.parts:
                raise ConfigurationError(
                    f"{self.origin}: {name} is there as it is, and quantised as {tensor.parts[0]}: leave one of them out"
                )
        return found

    @property
    def origin(self) -> str:
        """See TensorSource."""
        return self.source.origin

    @cached_property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        parts = {part for tensor in self._quantised.values() for part in tensor.parts}
        plain = (name for name in self.source.names if name not in parts and not UNREAD.fullmatch(name))
        return dict.fromkeys((*plain, *self._quantised)).keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        if name in self._quantised:
            return TensorInfo(self._quantised[name].shape, np.dtype(np.float32))
        return self.source.info(name)

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        if name in self._quantised:
            return self._quantised[name].read(index)
        return self.source.read(name, index)
