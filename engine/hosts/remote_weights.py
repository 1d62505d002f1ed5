"""New weights in every process, staged and found to be in order before any process writes them;
and adapters, which process 0 alone reads.

Each process has a connection for this beside that of its commands, so that no step waits for
tensors. Files are read by each process itself. Arrays are at process 0 alone: a process asks it
for the parts that its devices need, one after the other, so neither has a second copy of them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError, HostsError
from engine.live.weight_source import StartWeights, WeightFiles, WeightSource
from engine.models.weights.sources.tensor_source import TensorSource

PIECE_BYTES = 2**24
"""Of a tensor's part in one message."""


class StageFiles(msgspec.Struct, frozen=True, tag="stage files"):
    """Stage the weights of a directory or bucket; without a path, those of the process's start."""

    number: int
    path: str | None


class StageTensors(msgspec.Struct, frozen=True, tag="stage tensors"):
    """Stage tensors that process 0 has."""

    number: int
    origin: str
    tensors: dict[str, tuple[str, list[int]]]
    """By name, the dtype and the shape."""


class TakeAdapter(msgspec.Struct, frozen=True, tag="adapter"):
    """Keep an adapter in host memory; the bytes of its arrays follow."""

    number: int
    """Its uid."""
    arrays: list[tuple[str, list[int]]]
    """The dtype and the shape of each, in order."""


class ReadTensor(msgspec.Struct, frozen=True, tag="read"):
    """Asks process 0 for a part of a tensor."""

    name: str
    bounds: list[tuple[int, int]]
    """By axis, where it begins and ends."""


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """Process 0's answer, before the bytes of the part; none come if there is a refusal."""

    refusal: str


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """What was to be staged under this number is, unless there is a refusal, which says why not."""

    number: int
    refusal: str
    fingerprint: int
    """See StagedWeights; 0 of an adapter."""


class RemoteProcess:
    """Process 0's connection to another process, for weights. One thread at a time uses it."""

    def __init__(self, process_id: int, connection: Connection) -> None:
        self._process_id = process_id
        self._connection = connection

    def stage(self, number: int, source: WeightSource, tensors: TensorSource) -> Staged:
        """Have the process stage weights; returns what came of it. Raises HostsError if it has
        gone."""
        try:
            send(self._connection, _order(number, source, tensors))
            while isinstance(answer := _answers.decode(self._connection.recv_bytes()), ReadTensor):
                self._send_part(tensors, answer)
        except (EOFError, OSError) as error:
            raise HostsError(f"process {self._process_id} has gone ({error})") from error
        return answer

    def send_adapter(self, uid: int, arrays: ListOf[NDArray[Any]]) -> None:
        """Have the process keep an adapter; returns when it does. Raises HostsError if it has gone."""
        try:
            send(self._connection, TakeAdapter(uid, [(array.dtype.name, list(array.shape)) for array in arrays]))
            for array in arrays:
                self._send_bytes(array)
            _answers.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HostsError(f"process {self._process_id} has gone ({error})") from error

    def _send_part(self, tensors: TensorSource, part: ReadTensor) -> None:
        try:
            read = tensors.read(part.name, tuple(slice(*bounds) for bounds in part.bounds))
        except ConfigurationError as refusal:
            send(self._connection, Reading(str(refusal)))
            return
        send(self._connection, Reading(""))
        self._send_bytes(read)

    def _send_bytes(self, array: NDArray[Any]) -> None:
        for piece in pieces_of(np.ascontiguousarray(array)):
            self._connection.send_bytes(piece)


def pieces_of(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of an array that lies in one piece, as they are sent."""
    content = array.reshape(-1).view(np.uint8)
    for begin in range(0, content.size, PIECE_BYTES):
        yield content[begin : begin + PIECE_BYTES].data


def _order(number: int, source: WeightSource, tensors: TensorSource) -> StageFiles | StageTensors:
    match source:
        case StartWeights():
            return StageFiles(number, None)
        case WeightFiles(path=path):
            return StageFiles(number, path)
    infos = {name: tensors.info(name) for name in tensors.names}
    return StageTensors(
        number, tensors.origin, {name: (info.stored_as, list(info.shape)) for name, info in infos.items()}
    )


def send(
    connection: Connection, message: StageFiles | StageTensors | TakeAdapter | ReadTensor | Reading | Staged
) -> None:
    """Send a message. Raises OSError if nobody is there."""
    connection.send_bytes(_encoder.encode(message))


_encoder = msgspec.msgpack.Encoder()
_answers: msgspec.msgpack.Decoder[ReadTensor | Staged] = msgspec.msgpack.Decoder(ReadTensor | Staged)
