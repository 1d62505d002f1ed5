"""The messages between the daemon and the worker processes that run grammars.

The fork server reads a TokenizerDefinition from its stdin and answers READY on its socket. Every
later message on that socket is a WorkerLimits with one file descriptor: the socket of a worker to
fork. The fork server sends an ENDING for each worker that has ended.

A worker sends READY too, and then answers frames in order. BEGIN carries a grammar and the tokens
that a new matcher starts behind, ADVANCE the next tokens, and guesses of those behind them: the
answer to both is GO, COMPLETE or ERROR, and its cost. END drops a matcher and has no answer.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

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
_BEGINNING = struct.Struct("<II")
_ADVANCE = struct.Struct("<I")
_WAY_ON = struct.Struct("<III")
TOKEN = struct.Struct("<I")
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


class WayOn(NamedTuple):
    """How a text may go on."""

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


def pack_beginning(job: bytes, num_drafts: int, tokens: bytes) -> bytes:
    """The body of BEGIN: an encoded GrammarJob, how many drafts are asked for, and tokens, u32
    each."""
    return b"".join((_BEGINNING.pack(len(job), num_drafts), job, tokens))


def unpack_beginning(body: bytes) -> tuple[bytes, int, list[int]]:
    """The encoded GrammarJob, the number of drafts and the tokens of BEGIN."""
    length, num_drafts = _BEGINNING.unpack_from(body)
    end = _BEGINNING.size + length
    return body[_BEGINNING.size : end], num_drafts, unpack_tokens(body[end:])


def pack_advance(token_ids: Sequence[int], guess: Sequence[int]) -> bytes:
    """The body of ADVANCE: how many tokens there are, tokens, and guesses, u32 each."""
    return b"".join((_ADVANCE.pack(len(token_ids)), *map(TOKEN.pack, token_ids), *map(TOKEN.pack, guess)))


def unpack_advance(body: bytes) -> tuple[list[int], list[int]]:
    """The tokens of ADVANCE, and guesses of those behind them."""
    (count,) = _ADVANCE.unpack_from(body)
    token_ids = unpack_tokens(body[_ADVANCE.size :])
    return token_ids[:count], token_ids[count:]


def unpack_tokens(packed: bytes) -> list[int]:
    """Of u32 each."""
    return [token_id for (token_id,) in TOKEN.iter_unpack(packed)]


def pack_way_on(way: WayOn) -> bytes:
    """The body of GO."""
    numbers = _WAY_ON.pack(len(way.expected), way.num_forced, len(way.masks))
    return b"".join((numbers, *map(TOKEN.pack, way.expected), way.mask, *way.masks))


def unpack_way_on(body: bytes) -> WayOn:
    """Of the body of GO."""
    num_expected, num_forced, num_masks = _WAY_ON.unpack_from(body)
    begin = _WAY_ON.size + TOKEN.size * num_expected
    size = (len(body) - begin) // (1 + num_masks)
    mask, *masks = (body[at : at + size] for at in range(begin, len(body), size))
    return WayOn(mask, unpack_tokens(body[_WAY_ON.size : begin]), num_forced, masks)
