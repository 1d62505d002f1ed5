"""New weights in every process, staged and found to be in order before any process writes them.

Each process has a connection for this beside that of its commands, so that no step waits for
tensors. Files are read by each process itself. Arrays are at process 0 alone: a process asks it
for the parts that its devices need, one after the other, so neither has a second copy of them.
"""

from multiprocessing.connection import Connection

import msgspec
import numpy as np

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


class ReadTensor(msgspec.Struct, frozen=True, tag="read"):
    """Asks process 0 for a part of a tensor."""

    name: str
    bounds: list[tuple[int, int]]
    """By axis, where it begins and ends."""


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """Process 0's answer, before the bytes of the part; none come if there is a refusal."""

    refusal: str


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The weights are staged, unless there is a refusal, which says why they are not."""

    number: int
    refusal: str
    fingerprint: int
    """See StagedWeights."""


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

    def _send_part(self, tensors: TensorSource, part: ReadTensor) -> None:
        try:
            read = tensors.read(part.name, tuple(slice(*bounds) for bounds in part.bounds))
        except ConfigurationError as refusal:
            send(self._connection, Reading(str(refusal)))
            return
        send(self._connection, Reading(""))
        content = np.ascontiguousarray(read).reshape(-1).view(np.uint8)
        for begin in range(0, content.size, PIECE_BYTES):
            self._connection.send_bytes(content[begin : begin + PIECE_BYTES].data)


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


def send(connection: Connection, message: StageFiles | StageTensors | ReadTensor | Reading | Staged) -> None:
    """Send a message. Raises OSError if nobody is there."""
    connection.send_bytes(_encoder.encode(message))


_encoder = msgspec.msgpack.Encoder()
_answers: msgspec.msgpack.Decoder[ReadTensor | Staged] = msgspec.msgpack.Decoder(ReadTensor | Staged)
