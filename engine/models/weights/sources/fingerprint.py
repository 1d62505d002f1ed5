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
        found = crc32(f"{name} {_stored(source, name)}".encode(), found)
    if of_numbers:
        for beginning in _beginnings(source, sorted(names, key=lambda name: crc32(name.encode()))):
            found = crc32(beginning, found)
    return found


def _stored(source: TensorSource, name: str) -> str:
    """A tensor's dtype and shape, of a checkpoint in its own words: a tensor that no model reads may be of any dtype."""
    if isinstance(source, SafetensorsSource):
        entry = source.tensors[name].entry
        return f"{entry.dtype} {entry.shape}"
    if isinstance(source, EasyDeLCheckpoint):
        part = source.tensors[name]
        return f"{part.array.dtype} {part.shape}"
    info = source.info(name)
    return f"{info.dtype} {info.shape}"


def _beginnings(source: TensorSource, names: list[str]) -> Iterable[bytes]:
    """The first numbers of some of these tensors."""
    if isinstance(source, SafetensorsSource):
        return source.beginnings(names[:COMPARED_TENSORS], BEGINNING)
    if isinstance(source, EasyDeLCheckpoint):
        rows = [name for name in names if source.tensors[name].shape]
        return [_first_row(source, name) for name in rows[:COMPARED_PARTS]]
    return ()


def _first_row(source: EasyDeLCheckpoint, name: str) -> bytes:
    shape = source.tensors[name].shape
    return source.read(name, (*(slice(0, 1) for _ in shape[:-1]), *(slice(0, size) for size in shape[-1:]))).tobytes()
