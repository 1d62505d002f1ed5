"""What the daemon and the processes of grammars say to each other.

The first process is told a TokenizerDefinition on its stdin, and says READY. Each message on its socket after that is a
WorkerLimits, with one descriptor: the socket of a worker to be forked. It says an ENDING of each worker that has ended.

A worker says READY, too, and then answers frames. BEGIN brings a grammar and the tokens that a new matcher has behind it,
ADVANCE one more token: both are answered by GO, COMPLETE or ERROR, in the order in which they came, with what the answer
has cost. END forgets a matcher and is not answered.
"""

import struct

import msgspec

READY, GO, COMPLETE, ERROR = range(4)
"""How an answer begins. READY has the worker's process id for a number; GO has the mask of tokens that may be next behind it; COMPLETE says that none may, ERROR why
nobody can say (UTF-8)."""
BEGIN, ADVANCE, END = range(3)
"""What a frame asks for."""
FRAME = struct.Struct("<IIB")
"""Head of a frame: bytes that follow it, number of the matcher, what is asked for."""
ANSWER = struct.Struct("<IIBII")
"""Head of an answer: bytes that follow it, number of the matcher, how it went, microseconds of processor time, and
kibibytes by which the worker has become larger than ever before."""
_JOB = struct.Struct("<I")
TOKEN = struct.Struct("<I")
ENDING = struct.Struct("<Ii")
"""A worker's process id, and the signal that ended it, or 0."""

MEMORY_BYTES = 4 << 30
"""Of address space that a worker may have, tokenizer and libraries included."""
TOKENS_AT_ONCE = 1024
"""Tokens that a matcher may be told for the time of one."""


class TokenizerDefinition(msgspec.Struct, frozen=True):
    """``tokenizer`` is the JSON of a tokenizer.json; there are ``vocab_size`` ids, of which some end a text."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class WorkerLimits(msgspec.Struct, frozen=True):
    """Seconds of processor time for a frame: to compile a grammar, and for each TOKENS_AT_ONCE tokens or part of them."""

    compile_seconds: float
    token_seconds: float


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar as llguidance takes it.

    ``kind`` is json, regex or lark; ``options`` are JsonCompileOptions. ``hide_eos`` forbids the end of the text wherever
    it may go on.
    """

    kind: str
    source: str
    options: dict[str, str | bool] = {}
    hide_eos: bool = False


def pack_beginning(job: bytes, tokens: bytes) -> bytes:
    """What BEGIN has: an encoded GrammarJob, and tokens, u32 each."""
    return b"".join((_JOB.pack(len(job)), job, tokens))


def unpack_beginning(body: bytes) -> tuple[bytes, list[int]]:
    """The encoded GrammarJob and the tokens."""
    (length,) = _JOB.unpack_from(body)
    end = _JOB.size + length
    return body[_JOB.size : end], [token_id for (token_id,) in TOKEN.iter_unpack(body[end:])]
