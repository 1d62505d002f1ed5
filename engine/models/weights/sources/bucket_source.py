"""Safetensors files in a bucket (``gs://``), through eformer's ``ePath``.

What a device has of a tensor is read as a range of bytes, and nothing is written to a disk.

Credentials are Google's: a VM's own, those of ``gcloud auth application-default login``, or the
file that GOOGLE_APPLICATION_CREDENTIALS names. STORAGE_EMULATOR_HOST is another server.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError, DownloadFailed
from engine.models.weights.sources.checkpoint import SafetensorsSource, Stored
from engine.models.weights.sources.safetensors_header import entries, header_size

RANGE_BYTES = 16 * 2**20
STREAMS = 8
"""Ranges of one tensor that are read at once: one connection is slower than the network."""


@dataclass
class BucketCheckpoint(SafetensorsSource[Any]):
    """A TensorSource.

    Of each tensor of one module, a weight and its scales, the rows read last are kept: each device
    may take its columns of them.
    """

    origin: str
    tensors: Mapping[str, Stored[Any]]
    pool: ThreadPoolExecutor
    _last: dict[str, tuple[tuple[int, int], NDArray[Any]]] = field(default_factory=dict, init=False)

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises DownloadFailed."""
        shape = self.info(name).shape
        bounds = index[0].indices(shape[0])[:2] if shape else (0, 1)
        if self._last.get(name, (None,))[0] != bounds:
            module = name.rpartition(".")[0]
            self._last = {other: rows for other, rows in self._last.items() if other.rpartition(".")[0] == module}
            self._last.pop(name, None)
            self._last[name] = bounds, self._rows(name, *bounds)
        rows = self._last[name][1]
        return rows[(slice(None), *index[1:])] if shape else rows.reshape(())

    def beginnings(self, names: Sequence[str], count: int) -> Iterable[bytes]:
        """As of any source; several are asked for at once. Raises DownloadFailed."""
        with bucket_errors(self.origin):
            stored = [self.tensors[name] for name in names]
            return list(self.pool.map(self.first_bytes, stored, (min(count, one.num_bytes) for one in stored)))

    def first_bytes(self, stored: Stored[Any], count: int) -> bytes:
        """See SafetensorsSource."""
        return _downloaded(stored.file, stored.begin, stored.begin + count) if count else b""

    def _rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        stored, info = self.tensors[name], self.info(name)
        row = info.dtype.itemsize * math.prod(info.shape[1:])
        content = read_range(self.origin, stored.file, stored.begin + start * row, stored.begin + stop * row, self.pool)
        return np.frombuffer(content, info.dtype).reshape(stop - start, *info.shape[1:])


def bucket_path(url: str) -> Any:
    """The ``ePath`` of a directory."""
    from eformer.paths import ePath

    return ePath(url.rstrip("/"))


@contextmanager
def bucket_errors(url: str) -> Iterator[None]:
    """What may go wrong with a bucket, in words."""
    from google.api_core.exceptions import GoogleAPIError, NotFound
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from requests.exceptions import RequestException

    try:
        yield
    except DefaultCredentialsError as error:
        raise ConfigurationError(
            f"{url}: there are no credentials for Google's storage: `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to a service account's file"
        ) from error
    except NotFound as error:
        raise ConfigurationError(f"{url} is not there: {error.message}") from error
    except GoogleAPIError as error:
        status = getattr(error, "code", None)
        if status in (401, 403):
            raise ConfigurationError(f"{url}: these credentials may not read it: {error}") from error
        raise DownloadFailed(f"{url}: the storage answers {status}: {error}") from error
    except (GoogleAuthError, RequestException) as error:
        raise DownloadFailed(f"{url}: the storage cannot be reached: {error}") from error


def read_range(origin: str, blob: Any, begin: int, end: int, pool: ThreadPoolExecutor) -> bytes:
    """The bytes of a file in a bucket from ``begin`` up to ``end``; raises DownloadFailed."""

    def part(at: int) -> bytes:
        return _downloaded(blob, at, min(at + RANGE_BYTES, end))

    with bucket_errors(origin):
        content = b"".join(pool.map(part, range(begin, end, RANGE_BYTES)))
    if len(content) != end - begin:
        raise DownloadFailed(f"{origin}: {blob.name} ends after {begin + len(content)} bytes, not {end}")
    return content


def _downloaded(blob: Any, begin: int, end: int) -> bytes:
    return bytes(blob.download_as_bytes(start=begin, end=end - 1, checksum=None))


def bucket_checkpoint(url: str, files: list[str], pool: ThreadPoolExecutor) -> BucketCheckpoint:
    """The tensors of a directory's safetensors files. Raises ConfigurationError for others."""
    tensors: dict[str, Stored[Any]] = {}
    for name in files:
        blob = (bucket_path(url) / name).blob
        try:
            data = 8 + header_size(read_range(url, blob, 0, 8, pool))
            decoded = entries(read_range(url, blob, 8, data, pool))
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{url}/{name} is no safetensors file ({error}): upload it again") from error
        tensors |= {tensor: Stored(blob, data + entry.data_offsets[0], entry) for tensor, entry in decoded.items()}
    return BucketCheckpoint(url, tensors, pool)
