"""The messages between the daemon and the worker processes that run grammars.

The fork server reads a TokenizerDefinition from its stdin and answers READY on its socket. Every
later message on that socket is a WorkerLimits with one file descriptor: the socket of a worker to
fork. The fork server sends an ENDING for each worker that has ended.

A worker sends READY too, and then answers frames in order. BEGIN carries a grammar and the tokens
that a new matcher starts behind, ADVANCE one more token: the answer to both is GO, COMPLETE or
ERROR, and its cost. END drops a matcher and has no answer.
"""

import struct

import msgspec

READY, GO, COMPLETE, ERROR = range(4)
"""Kinds of answers. READY has the worker's process id for a number, GO the mask of the tokens that
may be next. COMPLETE means that no token may follow; ERROR has the reason (UTF-8)."""
BEGIN, ADVANCE, END = range(3)
"""Kinds of frames."""
FRAME = struct.Struct("<IIB")
"""Head of a frame: bytes that follow it, number of the matcher, kind."""
ANSWER = struct.Struct("<IIBII")
"""Head of an answer: bytes that follow it, number of the matcher, kind, microseconds of processor
time, and KiB by which the worker's peak size has grown."""
_JOB = struct.Struct("<I")
TOKEN = struct.Struct("<I")
ENDING = struct.Struct("<Ii")
"""A worker's process id, and the signal that ended it, or 0."""

MEMORY_BYTES = 4 << 30
"""Address space of a worker, tokenizer and libraries included."""
TOKENS_AT_ONCE = 1024
"""Tokens that a matcher may read in the time limit of one."""


class TokenizerDefinition(msgspec.Struct, frozen=True):
    """``tokenizer`` is a tokenizer.json; of the ``vocab_size`` ids some end a text."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class WorkerLimits(msgspec.Struct, frozen=True):
    """Seconds of processor time to compile a grammar, and to read TOKENS_AT_ONCE tokens."""

    compile_seconds: float
    token_seconds: float


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar for llguidance.

    ``kind`` is json, regex or lark; ``options`` are JsonCompileOptions. ``hide_eos`` forbids the
    end of the text wherever it may go on.
    """

    kind: str
    source: str
    options: dict[str, str | bool] = {}
    hide_eos: bool = False


def pack_beginning(job: bytes, tokens: bytes) -> bytes:
    """The body of BEGIN: an encoded GrammarJob, and tokens, u32 each."""
    return b"".join((_JOB.pack(len(job)), job, tokens))


def unpack_beginning(body: bytes) -> tuple[bytes, list[int]]:
    """The encoded GrammarJob and the tokens of BEGIN."""
    (length,) = _JOB.unpack_from(body)
    end = _JOB.size + length
    return body[_JOB.size : end], [token_id for (token_id,) in TOKEN.iter_unpack(body[end:])]
