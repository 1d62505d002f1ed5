"""Checkpoints that EasyDeL saves, through ``eformer.serialization``, in a directory or a bucket.

``tensorstore_index.json`` lists the arrays under ``model/``, one zarr array each, which are read
in parts. A name there is a path of modules, ``model/model/layers/0/self_attn/q_proj/kernel``, and
a kernel is [inputs, outputs], where a Hugging Face checkpoint has [outputs, inputs].
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError, DownloadFailed
from engine.hub.names import BUCKET
from engine.models.weights.sources.checkpoint import read_json
from engine.models.weights.sources.tensor_source import HEAD, TensorInfo, read_dtype

TENSORSTORE_INDEX = "tensorstore_index.json"
MODEL = "model"
"""The tree of the parameters; others are an optimizer's."""
ARRAYS = f"{MODEL}/*"
"""A pattern of the files of its arrays."""
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}
"""Kernels side by side in one array, in this order."""
_TABLES = ("embed_tokens",)
"""Modules whose array is [vocabulary, hidden] in both."""


class _Array(msgspec.Struct):
    path: str
    shape: tuple[int, ...]
    dtype: str


class _Config(msgspec.Struct):
    tie_word_embeddings: bool = False


class _Index(msgspec.Struct):
    prefixes: dict[str, list[_Array]]


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is: one of the ``parts`` of an array's last axis, transposed or not."""

    array: _Array
    transposed: bool
    number: int
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As a Hugging Face checkpoint has it."""
        shape = (*self.array.shape[:-1], self.array.shape[-1] // self.parts)
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class EasyDeLCheckpoint:
    """A TensorSource of arrays in zarr's format."""

    origin: str
    tensors: Mapping[str, _Stored]
    _open: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        stored = self.tensors[name]
        return TensorInfo(stored.shape, read_dtype(self.origin, name, stored.array.dtype))

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError for a missing array, and DownloadFailed."""
        stored = self.tensors[name]
        bounds = [part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True)]
        bounds = bounds[::-1] if stored.transposed else bounds
        offset = stored.number * (stored.array.shape[-1] // stored.parts)
        bounds[-1] = bounds[-1][0] + offset, bounds[-1][1] + offset
        part = self._read(stored.array.path, tuple(slice(*bound) for bound in bounds))
        return part.T if stored.transposed else part

    def _read(self, path: str, index: tuple[slice, ...]) -> NDArray[Any]:
        import tensorstore
        from jax.experimental.array_serialization.serialization import get_tensorstore_spec

        try:
            if path not in self._open:
                spec = tensorstore.Spec(get_tensorstore_spec(f"{self.origin}/{path}"))
                self._open[path] = tensorstore.open(spec, open=True, read=True).result()
            return np.asarray(self._open[path][index].read().result())
        except ValueError as error:
            broken = DownloadFailed if self.origin.startswith(BUCKET) else ConfigurationError
            raise broken(f"{self.origin}/{path} cannot be read: {error}") from error


def easydel_checkpoint(directory: Path, url: str | None) -> EasyDeLCheckpoint:
    """The checkpoint whose index is in a directory, and its arrays there or at a URL.

    Raises ConfigurationError if the index has no model.
    """
    index = read_json(directory / TENSORSTORE_INDEX, _Index)
    if MODEL not in index.prefixes:
        raise ConfigurationError(f"{directory / TENSORSTORE_INDEX} has no {MODEL!r}, only {', '.join(index.prefixes)}")
    tensors = dict(pair for array in index.prefixes[MODEL] for pair in _tensors(array))
    if read_json(directory / "config.json", _Config).tie_word_embeddings:
        tensors.pop(HEAD, None)  # EasyDeL has a head all the same, and does not use it
    return EasyDeLCheckpoint(url or str(directory.absolute()), tensors)


def _tensors(array: _Array) -> list[tuple[str, _Stored]]:
    """The Hugging Face names of what an array has: one, or several side by side."""
    *modules, leaf = array.path.split("/")[1:]
    kind = "bias" if leaf == "bias" else "weight"
    parts = _FUSED.get(modules[-1], (modules[-1],))
    transposed = len(array.shape) == 2 and modules[-1] not in _TABLES
    return [
        (".".join((*modules[:-1], part, kind)), _Stored(array, transposed, number, len(parts)))
        for number, part in enumerate(parts)
    ]
