"""What a StepExecutor does, as data: on several hosts process 0 sends these commands to the others, which answer little."""

import math
import struct
from typing import Any

import msgspec
import numpy as np

from engine.sampling.logit_bias import LogitBias
from engine.sampling.needs import Need
from engine.sampling.penalties import Penalties


class StepDescription(msgspec.Struct, frozen=True, tag="step"):
    """A step of the bucket of ``tokens`` tokens, for whichever process executes it: numbers, and nothing of its sequences.

    Executed in the same order, it gives the same everywhere.
    """

    tokens: int
    packed: Any
    """i32[layout.size] (engine/step/layout.py)."""
    needs: Need
    """Of any row that samples."""
    bias: list[tuple[int, LogitBias]]
    """Slots and the rows to be written for them."""
    penalties: list[tuple[int, Penalties]]
    """The same."""
    masks: Any = None
    """i32[rows, words] of ``pack_masks``, where a row has a constraint."""
    prompt_tokens: Any = None
    """i32[blocks, 2, PROMPT_BLOCK]: places in the flat batch, and the tokens after them whose log-probabilities are asked."""


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
