"""What the processes of an engine on several hosts say to each other. Process 0 says commands, the others answer little."""

import math
import struct
from typing import Any

import msgspec
import numpy as np

from engine.step.step_description import StepDescription


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """The oldest step that has not landed yet has, and gave these tokens; everybody's has to have given the same."""

    token_ids: Any
    """i32[rows]"""


class DropCache(msgspec.Struct, frozen=True, tag="drop cache"):
    """``StepExecutor.drop_cache``."""


class AllocateCache(msgspec.Struct, frozen=True, tag="allocate cache"):
    """``StepExecutor.allocate_cache``."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The end, and the exit code to end with."""

    code: int
    why: str


Command = StepDescription | Landed | DropCache | AllocateCache | Leave


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The first that a process says to process 0: which one it is."""

    process_id: int


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The process ends, which is everybody's end."""

    why: str


class AskToStop(msgspec.Struct, frozen=True, tag="ask to stop"):
    """The process was told to stop: would process 0 finish what is open, and then have everybody leave?"""

    why: str


Answer = Joined | Left | AskToStop

_DTYPES = (np.dtype(np.int32), np.dtype(np.float32))


def encode(message: Command | Answer) -> bytes:
    """As msgpack; arrays are extensions of it, numbered by their dtype: the rank, the shape and the numbers."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises msgspec.ValidationError and DecodeError."""
    command: Command = _commands.decode(frame)
    return command


def decode_answer(frame: bytes) -> Answer:
    """Raises as ``decode_command`` does."""
    answer: Answer = _answers.decode(frame)
    return answer


def _encode_array(array: Any) -> msgspec.msgpack.Ext:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(type(array))
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return msgspec.msgpack.Ext(_DTYPES.index(array.dtype), shape + array.tobytes())


def _decode_array(code: int, data: memoryview) -> Any:
    shape = struct.unpack_from(f"<{data[0]}I", data, 1)
    numbers = np.frombuffer(data, _DTYPES[code], math.prod(shape), offset=1 + 4 * len(shape))
    return numbers.reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_commands = msgspec.msgpack.Decoder(Command, ext_hook=_decode_array)
_answers = msgspec.msgpack.Decoder(Answer)
