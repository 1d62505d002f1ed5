"""Where new weights come from, as data. It loads no jax."""

from typing import Any

import msgspec

SHARED_MEMORY = "/dev/shm"
"""Where Linux has the objects of ``shm_open``."""


class SharedArray(msgspec.Struct, frozen=True):
    """A tensor in shared memory, in row-major order."""

    object_name: str
    """Of ``shm_open``, without the slash."""
    offset: int
    """Of its first byte."""
    dtype: str
    """Numpy's name or that of the safetensors format: float32, F32, bfloat16, BF16 and so on."""
    shape: list[int]


class StartWeights(msgspec.Struct, frozen=True):
    """All of a model's weights, from where they were read at the start."""


class WeightFiles(msgspec.Struct, frozen=True):
    """All of a model's weights, in a directory or a bucket's (``gs://``)."""

    path: str


class SharedWeights(msgspec.Struct, frozen=True):
    """All or some of a model's weights, in shared memory, by their names in a checkpoint."""

    arrays: dict[str, SharedArray]


class WeightArrays(msgspec.Struct, frozen=True):
    """The same, in this process's memory; nobody may change them any more."""

    arrays: dict[str, Any]
    """Of numpy's arrays."""


Rereadable = StartWeights | WeightFiles
"""What can be read again, and has all of the weights."""
WeightSource = Rereadable | SharedWeights | WeightArrays
