"""What the daemon and the processes of grammars say to each other.

The first process is told a TokenizerDefinition on its stdin, and says READY. Each message on its socket after that brings one descriptor
for each sequence that is to follow a grammar. On the first of those comes a GrammarJob, answered by GO or ERROR; after GO
each of them takes messages of tokens, of ``pack_tokens``, and answers each with GO, COMPLETE or ERROR.
"""

import struct

import msgspec

READY = b"r"
GO, COMPLETE, ERROR = b"g", b"c", b"e"
"""How an answer begins: which tokens may be next (their mask follows); that none may; why nobody can say (UTF-8)."""
_TOKEN = struct.Struct("<I")

TOKENS_AT_ONCE = 1024
"""Tokens of a message at most."""
COMPILE_SECONDS = 5.0
TOKEN_SECONDS = 1.0
"""Of processor time, for a message of tokens."""
MEMORY_BYTES = 4 << 30
"""Of address space, tokenizer and libraries included."""
MAX_MESSAGE = 1 << 20
MAX_SEQUENCES = 64


class TokenizerDefinition(msgspec.Struct, frozen=True):
    """``tokenizer`` is the JSON of a tokenizer.json; there are ``vocab_size`` ids, of which some end a text."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar as llguidance takes it.

    ``kind`` is json, regex or lark; ``options`` are JsonCompileOptions. ``hide_eos`` forbids the end of the text wherever
    it may go on.
    """

    kind: str
    source: str
    options: dict[str, str | bool] = {}
    hide_eos: bool = False


def pack_tokens(token_ids: list[int]) -> bytes:
    """A message of tokens."""
    return b"".join(map(_TOKEN.pack, token_ids))


def unpack_tokens(message: bytes) -> list[int]:
    """The tokens of a message."""
    return [token_id for (token_id,) in _TOKEN.iter_unpack(message)]
