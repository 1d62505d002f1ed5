"""What a process other than process 0 does to stage new weights and adapters (remote_weights.py)."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows its dtypes by their names then
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.hosts.remote_weights import (
    Reading,
    ReadTensor,
    Staged,
    StageFiles,
    StageTensors,
    TakeAdapter,
    pieces_of,
    send,
)
from engine.live.weight_source import StartWeights, WeightFiles
from engine.models.weights.sources.tensor_source import TensorInfo, read_dtype
from engine.step.executor import StepExecutor

logger = logging.getLogger(__name__)


def stage_as_told(executor: StepExecutor, connection: Connection) -> None:
    """Stage what process 0 says, until it has gone. A refusal is told to process 0 alone."""
    while True:
        try:
            order = _orders.decode(connection.recv_bytes())
            if isinstance(order, TakeAdapter):
                executor.add_adapter(order.number, _received(order, connection))
                answer = Staged(order.number, "", 0)
            else:
                answer = _staged(executor, order, connection)
            send(connection, answer)
        except (EOFError, OSError, _Gone):
            return


def _staged(executor: StepExecutor, order: StageFiles | StageTensors, connection: Connection) -> Staged:
    try:
        fingerprint = _stage(executor, order, connection)
    except ConfigurationError as refusal:
        return Staged(order.number, str(refusal), 0)
    except _Gone:
        raise
    except Exception as fault:
        logger.exception("weights could not be read")
        return Staged(order.number, f"a fault: its log has the details ({type(fault).__name__})", 0)
    return Staged(order.number, "", fingerprint)


def _stage(executor: StepExecutor, order: StageFiles | StageTensors, connection: Connection) -> int:
    if isinstance(order, StageTensors):
        sent = {
            name: TensorInfo(tuple(shape), read_dtype(order.origin, name, dtype))
            for name, (dtype, shape) in order.tensors.items()
        }
        return executor.stage_weights(order.number, _SentTensors(order.origin, sent, connection)).fingerprint
    source = StartWeights() if order.path is None else WeightFiles(order.path)
    with executor.live_weights.open(source) as tensors:
        return executor.stage_weights(order.number, tensors, source).fingerprint


def _received(order: TakeAdapter, connection: Connection) -> tuple[NDArray[Any], ...]:
    arrays = tuple(np.empty(shape, np.dtype(name)) for name, shape in order.arrays)
    for array in arrays:
        for piece in pieces_of(array):
            connection.recv_bytes_into(piece)
    return arrays


class _Gone(Exception):
    """Process 0 has gone."""


@dataclass(frozen=True)
class _SentTensors:
    """A TensorSource of what process 0 has."""

    origin: str
    tensors: Mapping[str, TensorInfo]
    connection: Connection

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        return self.tensors[name]

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError if process 0 cannot read it any more."""
        info = self.tensors[name]
        bounds = [at.indices(size)[:2] for at, size in zip(index, info.shape, strict=True)]
        part = np.empty([stop - start for start, stop in bounds], info.dtype)
        try:
            send(self.connection, ReadTensor(name, bounds))
            refusal = _readings.decode(self.connection.recv_bytes()).refusal
            for piece in pieces_of(part) if not refusal else ():
                self.connection.recv_bytes_into(piece)
        except (EOFError, OSError) as error:
            raise _Gone from error
        if refusal:
            raise ConfigurationError(refusal)
        return part


_orders: msgspec.msgpack.Decoder[StageFiles | StageTensors | TakeAdapter] = msgspec.msgpack.Decoder(
    StageFiles | StageTensors | TakeAdapter
)
_readings = msgspec.msgpack.Decoder(Reading)
