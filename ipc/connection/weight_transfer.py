"""Arrays of a process to a daemon: through shared memory of one machine, or in messages."""

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.live.weight_source import SHARED_MEMORY, SharedArray
from ipc.wire.operations import WeightChunk

IPC = "ipc://"
CHUNK_BYTES = 2 * 2**20
"""Of a tensor in one message."""
TENSORS = 4096
"""Tensors in shared memory that one message names: an entry has up to about 800 bytes."""
ALIGNMENT = 64
PREFIX = "odriver-update-"
"""Of the names of objects."""


def contiguous(arrays: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    """The arrays as numpy's, in row-major order and this machine's byte order."""
    made = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in made.items()}


def shares_memory(address: str) -> bool:
    """Whether the daemon at an address is on this machine and of this user, as far as its socket
    tells."""
    path = Path(address.removeprefix(IPC))
    return address.startswith(IPC) and path.exists() and path.stat().st_uid == os.geteuid()


@contextmanager
def in_shared_memory(arrays: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, SharedArray]]:
    """Where the arrays are in an object of shared memory, which is there within the block alone.

    Those of processes that were killed are removed first. Raises OSError if there is too little.
    """
    _remove_abandoned()
    name, descriptor = _new_object()
    places, size = {}, 0
    for tensor, array in arrays.items():
        places[tensor] = SharedArray(name, size, array.dtype.name, list(array.shape))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))  # else a lack of memory would show only when it is written
        for tensor, array in arrays.items():
            _write(descriptor, _bytes(array), places[tensor].offset)
        yield places
    finally:
        os.close(descriptor)
        os.unlink(f"{SHARED_MEMORY}/{name}")


def _new_object() -> tuple[str, int]:
    """An object's name and descriptor. It is locked as long as this process has it: the kernel
    unlocks what a killed process had."""
    while True:
        name = f"{PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(f"{SHARED_MEMORY}/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)  # another process took it for abandoned before it was locked


def _remove_abandoned() -> None:
    """Remove the objects of this user's processes that were killed: each may be as large as a model."""
    for path in Path(SHARED_MEMORY).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, of another user, or was removed meanwhile
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def in_parts(arrays: Mapping[str, SharedArray]) -> list[dict[str, SharedArray]]:
    """What each of several messages has of them, of which there is one at least."""
    entries = list(arrays.items())
    return [dict(entries[begin : begin + TENSORS]) for begin in range(0, max(1, len(entries)), TENSORS)]


def in_messages(arrays: Mapping[str, NDArray[Any]], request_ids: Iterator[str]) -> Iterator[WeightChunk]:
    """The messages that carry the arrays."""
    for name, array in arrays.items():
        content, dtype, shape = _bytes(array), array.dtype.name, list(array.shape)
        for offset in range(0, max(1, len(content)), CHUNK_BYTES):
            part = content[offset : offset + CHUNK_BYTES].tobytes()
            yield WeightChunk(next(request_ids), name, dtype, shape, offset, part)


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
