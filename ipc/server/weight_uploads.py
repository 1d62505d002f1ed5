"""Weights on their way from a client of the control socket, in messages. No socket or clock here."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driver.errors import InvalidRequest, Overloaded
from engine.errors import ConfigurationError
from engine.live.weight_source import SharedArray
from engine.memory.host_memory import available_bytes
from engine.models.weights.sources.tensor_source import read_dtype
from engine.request_limits import MAX_TENSORS
from ipc.wire.operations import WeightChunk

IDLE_LIMIT = 60.0
"""Seconds without a message after which an upload gives way to another client's."""
ORIGIN = "arrays in messages"


class WeightUploads:
    """The tensors of one client at a time, which are in this process's memory until they are
    taken. Times are in seconds, and the caller's."""

    def __init__(self) -> None:
        self._owner: bytes | None = None
        self._last = -math.inf
        self._tensors: dict[str, NDArray[Any]] = {}
        self._missing: dict[str, int] = {}
        """By tensor, the bytes that have not come; they come in order."""
        self._shared: dict[bytes, dict[str, SharedArray]] = {}
        """By client, the tensors in shared memory that it has named so far."""

    def add(self, identity: bytes, chunk: WeightChunk, now: float) -> None:
        """Takes some bytes. Raises InvalidRequest, which ends the upload, and Overloaded."""
        if self._owner not in (None, identity) and now < self._last + IDLE_LIMIT:
            raise Overloaded("another client sends weights: try again when it has sent all of them")
        if self._owner != identity:
            self._begin(identity)
        self._last = now
        try:
            self._write(chunk)
        except BaseException:
            self._begin(None)
            raise

    def take(self, identity: bytes) -> dict[str, NDArray[Any]]:
        """What a client has sent, which is forgotten here. Raises InvalidRequest if that is not
        whole."""
        if self._owner != identity:
            raise InvalidRequest("no weights have come on this connection: name a path, or send weight_chunk messages")
        tensors, missing = self._tensors, self._missing
        self._begin(None)
        for name, count in missing.items():
            if count:
                raise InvalidRequest(f"{count:,} bytes of {name} have not come: send the weights again")
        return tensors

    def add_shared(self, identity: bytes, arrays: Mapping[str, SharedArray]) -> None:
        """Takes some tensors in shared memory, before further ones. Raises InvalidRequest, and forgets them then, if there
        are too many."""
        named = self._shared.setdefault(identity, {})
        named |= arrays
        if len(named) > MAX_TENSORS:
            del self._shared[identity]
            raise InvalidRequest(f"weights have at most {MAX_TENSORS:,} tensors")

    def take_shared(self, identity: bytes, arrays: Mapping[str, SharedArray] | None) -> dict[str, SharedArray] | None:
        """The last ones with those that came before, which are forgotten here; None if none are in shared memory."""
        before = self._shared.pop(identity, None)
        return None if before is None and arrays is None else {**(before or {}), **(arrays or {})}

    def lost(self, identity: bytes) -> None:
        """Forgets what a client has sent, which is gone."""
        self._shared.pop(identity, None)
        if self._owner == identity:
            self._begin(None)

    def _begin(self, identity: bytes | None) -> None:
        self._owner, self._tensors, self._missing = identity, {}, {}

    def _write(self, chunk: WeightChunk) -> None:
        name = chunk.name
        if name not in self._tensors:
            self._tensors[name] = _room(chunk)
            self._missing[name] = self._tensors[name].nbytes
        tensor = self._tensors[name]
        if tensor.shape != tuple(chunk.shape) or tensor.dtype != _dtype(chunk):
            raise InvalidRequest(f"{name} had another shape or dtype before: send the weights again")
        if chunk.offset != tensor.nbytes - self._missing[name] or len(chunk.data) > self._missing[name]:
            raise InvalidRequest(f"the bytes of {name} have to come in order, each once: send the weights again")
        end = chunk.offset + len(chunk.data)
        tensor.reshape(-1).view(np.uint8)[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
        self._missing[name] -= len(chunk.data)


def _dtype(chunk: WeightChunk) -> np.dtype[Any]:
    try:
        return read_dtype(ORIGIN, chunk.name, chunk.dtype)
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from error


def _room(chunk: WeightChunk) -> NDArray[Any]:
    dtype = _dtype(chunk)
    # a size of 0 counts as 1: numpy has no arrays whose other sizes are larger than any memory, either
    num_bytes, available = math.prod(max(1, size) for size in chunk.shape) * dtype.itemsize, available_bytes()
    if num_bytes > available:
        raise InvalidRequest(f"{chunk.name} has {num_bytes:,} bytes, and the daemon's host has {available:,} free")
    return np.empty(chunk.shape, dtype)
