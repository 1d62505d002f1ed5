"""Commands of a StepExecutor, as data. On several hosts process 0 sends them to the others."""

import math
import struct
from typing import Any

import msgspec
import numpy as np

from engine.sampling.logit_bias import LogitBias
from engine.sampling.needs import Need
from engine.sampling.penalties import Penalties
from engine.scheduling.host_cache.copies import Copies


class KeptRows(msgspec.Struct, frozen=True):
    """Rows of a step whose logits are kept until they sample."""

    number: int
    """Of the step, to name it by."""
    rows: Any
    """i32[n], the rows and padding; None for all of the step's, in order."""


class StepDescription(msgspec.Struct, frozen=True, tag="step"):
    """A step in the bucket of ``tokens`` tokens: arrays and numbers, without its sequences.

    Every process that executes the same steps in the same order gets the same results.
    """

    tokens: int
    packed: Any
    """i32[layout.size] (engine/step/inputs/layout.py)."""
    needs: Need
    """Of all rows that sample."""
    changes: list[Any]
    """i32[SEPARATE.size] each (engine/step/inputs/slot_state.py), to be written before the step."""
    bias: list[tuple[int, LogitBias]]
    """Slots and the bias rows to write into them."""
    penalties: list[tuple[int, Penalties]]
    """Slots and the penalty rows to write into them."""
    history: list[Any] = []
    """Pieces of sequences that got a slot (engine/speculation/history.py), where rows may have
    drafts."""
    masks: Any = None
    """i32[rows, words] of ``pack_masks``; None if no row has a constraint."""
    prompt_tokens: Any = None
    """i32[blocks, 3, PROMPT_BLOCK]: flat-batch indices, the next tokens to get logprobs of, and the
    slots of their adapters, -1 of none."""
    has_adapters: bool = False
    """Whether some row has an adapter."""
    kept: KeptRows | None = None
    """Whose logits are kept."""
    samples: bool = True
    """Whether any row samples in the step."""
    drafted: Any = None
    """i32[2, rows] of DRAFT (engine/step/drafts/draft_programs.py); None if no row is to have drafts of a
    draft model."""
    feeds_draft_model: bool = False
    """Whether tokens are fed to a draft model that no DRAFT feeds to it."""
    expected: Any = None
    """i32[max_num_seqs, DRAFT_HEADER + most drafts] of ``expected_rows``; None if no row has such."""


class SampleKept(msgspec.Struct, frozen=True, tag="sample kept"):
    """``StepExecutor.sample``."""

    number: int
    """Of the step that made the logits."""
    sampling: Any
    """i32[NUM_FIELDS, n] of ``pack_inputs``, in which other rows than those to sample have the
    dump slot."""
    needs: Need
    """Of the rows to sample."""
    masks: Any
    """i32[n, words] of ``pack_masks``."""


class ForgetLogits(msgspec.Struct, frozen=True, tag="forget logits"):
    """``StepExecutor.forget_logits``."""

    number: int


class RemoveAdapter(msgspec.Struct, frozen=True, tag="remove adapter"):
    """``StepExecutor.remove_adapter``."""

    uid: int


class WriteAdapter(msgspec.Struct, frozen=True, tag="write adapter"):
    """``StepExecutor.write_adapter``."""

    uid: int
    slot: int


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """The oldest step in flight completed with these tokens. Every process must have the same."""

    token_ids: Any
    """i32[rows]"""


class DropCache(msgspec.Struct, frozen=True, tag="drop cache"):
    """``StepExecutor.drop_cache``."""


class ResetState(msgspec.Struct, frozen=True, tag="reset state"):
    """``StepExecutor.reset``."""


class DropWeights(msgspec.Struct, frozen=True, tag="drop weights"):
    """``StepExecutor.drop_weights``."""


class WriteWeights(msgspec.Struct, frozen=True, tag="write weights"):
    """``StepExecutor.write_weights``, of what every process has staged under this number."""

    number: int


class DiscardWeights(msgspec.Struct, frozen=True, tag="discard weights"):
    """``StepExecutor.discard_weights``."""

    number: int


class AllocateCache(msgspec.Struct, frozen=True, tag="allocate cache"):
    """``StepExecutor.allocate_cache``."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """End the process with this exit code."""

    code: int
    why: str


MemoryCommand = DropCache | AllocateCache | ResetState | DropWeights | WriteWeights | DiscardWeights
Command = (
    StepDescription | SampleKept | ForgetLogits | Copies | RemoveAdapter | WriteAdapter | Landed | MemoryCommand | Leave
)


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A process's first message on each of its connections to process 0: its id, and whether the
    connection is for staging weights (engine/hosts/remote_weights.py) and not for commands."""

    process_id: int
    stages: bool = False


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The process ends, with this exit code. The engine ends with it, and all other processes alike."""

    code: int
    why: str


class AskToStop(msgspec.Struct, frozen=True, tag="ask to stop"):
    """A process got a signal to stop: process 0 should finish open requests, then end all."""

    why: str
    seconds: float = math.inf
    """In which its host stops."""


Answer = Joined | Left | AskToStop

_DTYPES = (np.dtype(np.int32), np.dtype(np.float32))


def encode(message: Command | Answer) -> bytes:
    """As msgpack. An array is an extension, numbered by dtype: its rank, shape and numbers."""
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
