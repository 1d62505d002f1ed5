"""Whether two sources have the same tensors, without reading all of them."""

from collections.abc import Iterable
from zlib import crc32

from engine.models.weights.sources.checkpoint import SafetensorsSource
from engine.models.weights.sources.easydel import EasyDeLCheckpoint
from engine.models.weights.sources.tensor_source import TensorSource

COMPARED_TENSORS = 256
COMPARED_PARTS = 32
"""The same of EasyDeL's arrays, each of which costs a part of an array."""
BEGINNING = 4096
"""Bytes of each of them."""


def fingerprint(source: TensorSource, *, of_numbers: bool = True) -> int:
    """A number that two sources share if they have the same tensors.

    Of names, dtypes and shapes, and where these are files, perhaps of the first numbers of
    COMPARED_TENSORS: after a step of training nearly all are others. Which are compared is
    scattered over the names: every n-th could be the same few tensors of each layer, where an
    adapter that was merged has changed others. Raises as the source's ``read``.
    """
    names, found = sorted(source.names), 0
    for name in names:
        info = source.info(name)
        found = crc32(f"{name} {info.dtype} {info.shape}".encode(), found)
    if of_numbers:
        for beginning in _beginnings(source, sorted(names, key=lambda name: crc32(name.encode()))):
            found = crc32(beginning, found)
    return found


def _beginnings(source: TensorSource, names: list[str]) -> Iterable[bytes]:
    """The first numbers of some of these tensors."""
    if isinstance(source, SafetensorsSource):
        return source.beginnings(names[:COMPARED_TENSORS], BEGINNING)
    return (_first_row(source, name) for name in names[:COMPARED_PARTS] if isinstance(source, EasyDeLCheckpoint))


def _first_row(source: TensorSource, name: str) -> bytes:
    shape = source.info(name).shape
    return source.read(name, (*(slice(0, 1) for _ in shape[:-1]), *(slice(0, size) for size in shape[-1:]))).tobytes()
