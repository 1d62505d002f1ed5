"""Arrays that another process of this machine and user has put into POSIX shared memory."""

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.live.read_files import FilePart
from engine.live.weight_source import SHARED_MEMORY, SharedArray
from engine.models.weights.sources.tensor_source import TensorInfo, read_dtype

OBJECT_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")
ORIGIN = "arrays in shared memory"


@dataclass(frozen=True)
class SharedArrays:
    """A TensorSource. What it reads is a copy: the other process may write meanwhile."""

    files: Mapping[str, FilePart]
    """By object name."""
    arrays: Mapping[str, SharedArray]
    """By tensor name."""
    origin: str = ORIGIN

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.arrays.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        array = self.arrays[name]
        return TensorInfo(tuple(array.shape), read_dtype(self.origin, name, array.dtype))

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError if the object has become too small."""
        array, info = self.arrays[name], self.info(name)
        whole = self.files[array.object_name].read(array.offset, info.nbytes)
        return whole.view(info.dtype).reshape(info.shape)[index]


@contextmanager
def open_shared(arrays: Mapping[str, SharedArray]) -> Iterator[SharedArrays]:
    """The source of these arrays by tensor name.

    Raises ConfigurationError if an object is not there, belongs to another user or is too small.
    """
    files: dict[str, FilePart] = {}
    try:
        for name in dict.fromkeys(array.object_name for array in arrays.values()):
            files[name] = _open(name)
        source = SharedArrays(files, arrays)
        for name, array in arrays.items():
            _check_bounds(name, array, source.info(name), files[array.object_name])
        yield source
    finally:
        for file in files.values():
            os.close(file.descriptor)


def _open(name: str) -> FilePart:
    if not OBJECT_NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of shared memory: letters, digits, '.', '_' and '-'")
    path = f"{SHARED_MEMORY}/{name}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigurationError(f"shared memory {name} cannot be opened ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigurationError(f"shared memory {name} does not belong to the daemon's user")
    return FilePart(descriptor, path)


def _check_bounds(name: str, array: SharedArray, info: TensorInfo, file: FilePart) -> None:
    size = os.fstat(file.descriptor).st_size
    if array.offset < 0 or min(array.shape, default=1) < 0 or array.offset + info.nbytes > size:
        raise ConfigurationError(
            f"{name}: {info.nbytes:,} bytes from {array.offset:,} on are not within the {size:,} bytes of {array.object_name}"
        )
