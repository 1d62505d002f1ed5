"""What the daemon and the processes of grammars say to each other.

The first process is told a TokenizerDefinition on its stdin, and says READY. Each message on its socket after that brings one descriptor
for each sequence that is to follow a grammar. On the first of those comes a GrammarJob, answered by GO or ERROR; after GO
each of them takes tokens, packed as TOKEN, and answers one with GO, COMPLETE or ERROR.
"""

import struct

import msgspec

READY = b"r"
GO, COMPLETE, ERROR = b"g", b"c", b"e"
"""How an answer begins: which tokens may be next (their mask follows); that none may; why nobody can say (UTF-8)."""
TOKEN = struct.Struct("<I")

COMPILE_SECONDS = 5.0
TOKEN_SECONDS = 1.0
"""Of processor time."""
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
