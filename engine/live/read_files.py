"""Safetensors files that are read and never mapped: another process may be writing to them.

A file that is cut off while it is mapped would end the daemon (SIGBUS); one that is read is
found to be too short.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.sources.checkpoint import SafetensorsSource, Stored, weight_files
from engine.models.weights.sources.safetensors_header import entries, header_size


@dataclass(frozen=True)
class FilePart:
    """An open file. ``path`` is its name in errors."""

    descriptor: int
    path: str

    def read(self, begin: int, count: int) -> NDArray[np.uint8]:
        """So many of its bytes. Raises ConfigurationError if it ends before."""
        content = np.empty(count, np.uint8)
        buffer, done = memoryview(content.data), 0
        while done < count:
            try:
                step = os.preadv(self.descriptor, [buffer[done:]], begin + done)
            except OSError as error:
                raise ConfigurationError(f"{self.path} cannot be read ({error.strerror})") from error
            if not step:
                raise ConfigurationError(f"{self.path} ends after {begin + done:,} bytes, not {begin + count:,}")
            done += step
        return content


@dataclass
class ReadCheckpoint(SafetensorsSource[FilePart]):
    """A TensorSource; the tensor read last is kept, as each device may take its part of it."""

    origin: str
    tensors: Mapping[str, Stored[FilePart]]
    _last: tuple[str, NDArray[Any]] | None = field(default=None, init=False)

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError if the file has become too short."""
        if self._last is None or self._last[0] != name:
            stored, info = self.tensors[name], self.info(name)
            self._last = name, stored.file.read(stored.begin, info.nbytes).view(info.dtype).reshape(info.shape)
        return self._last[1][index]

    def first_bytes(self, stored: Stored[FilePart], count: int) -> bytes:
        """See SafetensorsSource."""
        return stored.file.read(stored.begin, count).tobytes()


@contextmanager
def open_files(directory: Path) -> Iterator[ReadCheckpoint]:
    """The tensors of a model directory. Raises ConfigurationError if missing or corrupt."""
    files: list[FilePart] = []
    try:
        tensors: dict[str, Stored[FilePart]] = {}
        for path in weight_files(directory):
            files.append(FilePart(os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path)))
            tensors |= _tensors(files[-1])
        yield ReadCheckpoint(str(directory), tensors)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read ({error.strerror})") from error
    finally:
        for file in files:
            os.close(file.descriptor)


@contextmanager
def open_file(path: Path) -> Iterator[ReadCheckpoint]:
    """The tensors of one file. Raises ConfigurationError if it is corrupt, and OSError."""
    file = FilePart(os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path))
    try:
        yield ReadCheckpoint(str(path), _tensors(file))
    finally:
        os.close(file.descriptor)


def _tensors(file: FilePart) -> dict[str, Stored[FilePart]]:
    size = os.fstat(file.descriptor).st_size
    try:
        data = 8 + header_size(file.read(0, 8).tobytes())
        found = entries(file.read(8, data - 8).tobytes())
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{file.path} is no safetensors file ({error}): write it again") from error
    for name, entry in found.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= size - data:
            raise ConfigurationError(f"{file.path} ends before its tensor {name} does: write it again")
    return {name: Stored(file, data + entry.data_offsets[0], entry) for name, entry in found.items()}
