"""The messages between the daemon and the worker processes that run grammars.

The fork server reads a TokenizerDefinition from its stdin and answers READY on its socket. Every
later message on that socket is a WorkerLimits with one file descriptor: the socket of a worker to
fork. The fork server sends an ENDING for each worker that has ended.

A worker sends READY too, and then answers frames in order. BEGIN carries a grammar and the tokens
that a new matcher starts behind, ADVANCE the next tokens, and guesses of those behind them: the
answer to both is GO, COMPLETE or ERROR, and its cost. END drops a matcher and has no answer.
"""

import struct

import msgspec

READY, GO, COMPLETE, ERROR = range(4)
"""Kinds of answers. READY has the worker's process id for a number, GO a WayOn. COMPLETE means that
no token may follow; ERROR has the reason (UTF-8)."""
BEGIN, ADVANCE, END = range(3)
"""Kinds of frames."""
FRAME = struct.Struct("<IIB")
"""Head of a frame: bytes that follow it, number of the matcher, kind."""
ANSWER = struct.Struct("<IIBII")
"""Head of an answer: bytes that follow it, number of the matcher, kind, microseconds of processor
time, and KiB by which the worker's peak size has grown."""
ENDING = struct.Struct("<Ii")
"""A worker's process id, and the signal that ended it, or 0."""

MEMORY_BYTES = 4 << 30
"""Address space of a worker, tokenizer and libraries included."""
TOKENS_AT_ONCE = 1024
"""Tokens that a matcher may read in the time limit of one."""


class TokenizerDefinition(msgspec.Struct, frozen=True):
    """``tokenizer`` is a tokenizer.json; of the ``vocab_size`` ids some end a text, which the
    tokenizer has."""

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


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """The body of BEGIN."""

    job: bytes
    """An encoded GrammarJob."""
    num_drafts: int
    """How many are asked for."""
    tokens: bytes
    """u32 each."""


class Advance(msgspec.Struct, frozen=True, array_like=True):
    """The body of ADVANCE: tokens, and guesses of those behind them."""

    token_ids: list[int]
    guess: list[int]


class WayOn(msgspec.Struct, frozen=True, array_like=True):
    """How a text may go on: the body of GO."""

    mask: bytes
    """i32 words: the tokens that may be next."""
    expected: list[int]
    """Tokens that are likely to be next: at most twice as many as drafts were asked for, and one."""
    num_forced: int
    """Those of them, the first ones, beside which the grammar leaves no other text. The others were
    guessed, and it allows them."""
    masks: list[bytes]
    """The tokens that may follow the first of them, the first two, and so on, up to as many as
    drafts were asked for."""


pack = msgspec.msgpack.Encoder().encode
unpack_beginning = msgspec.msgpack.Decoder(Beginning).decode
unpack_advance = msgspec.msgpack.Decoder(Advance).decode
unpack_way_on = msgspec.msgpack.Decoder(WayOn).decode
