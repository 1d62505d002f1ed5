"""The processes that grammars run in: one for each sequence, so that none can hold up, crash or starve the daemon.

llguidance bounds most of what a grammar costs, but not all of it: a few kilobytes of nested rules overflow its stack, and
some intersections of regular expressions take it minutes. So a grammar is compiled and followed in a process of its own,
within limits that the system enforces, and what goes wrong there is the end of that request alone.

The first process builds the tokenizer, once. For each message it forks a child, which compiles, and forks again until
there is a process for each sequence (driver/grammar_protocol.py has what they say). Who finds the other end of its socket
closed exits, and who is too busy to look is ended by its own alarm, so nobody outlives the daemon.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from driver.grammar_protocol import (
    COMPILE_SECONDS,
    COMPLETE,
    ERROR,
    GO,
    MAX_MESSAGE,
    MAX_SEQUENCES,
    MEMORY_BYTES,
    READY,
    TOKEN_SECONDS,
    GrammarJob,
    TokenizerDefinition,
    unpack_tokens,
)

MAX_ERROR = 500
"""Characters of llguidance's words to pass on: they quote lines of the grammar, which may be long."""
NO_TOKEN = "no token of this model can come next"


class GrammarError(Exception):
    """The grammar cannot be compiled, or followed any further; the message is for the client."""


class Vocabulary:
    """The tokenizer, and masks as the daemon wants them: i32 words of 32 tokens each, lowest bit first."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        vocab_size, eos = definition.vocab_size, list(definition.eos_token_ids)
        # Of a model without an end, the tokenizer's is never shown.
        self.tokenizer = LLTokenizer(definition.tokenizer, n_vocab=vocab_size, eos_token=eos or None)
        self._bytes = -(-vocab_size // 32) * 4
        self._going_on = (1 << vocab_size) - 1 & ~sum(1 << token_id for token_id in {*self.tokenizer.eos_tokens})
        self._known = (1 << vocab_size) - 1 if eos else self._going_on

    def mask_of(self, matcher: LLMatcher, *, hide_eos: bool) -> tuple[bytes, bool]:
        """The tokens that may be next, and whether one of them goes on with the text."""
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & self._known
        _check(matcher)
        going_on = mask & self._going_on
        shown = going_on if hide_eos and going_on else mask
        return shown.to_bytes(self._bytes, "little"), bool(going_on)


class Grammar:
    """A grammar and how far into it a sequence is."""

    def __init__(self, vocabulary: Vocabulary, job: GrammarJob) -> None:
        self._vocabulary = vocabulary
        self._hide_eos = job.hide_eos
        limits = LLParserLimits(verbose_errors=False)
        self._matcher = LLMatcher(vocabulary.tokenizer, _definition(job), log_level=0, limits=limits)
        _check(self._matcher)
        self.first_mask, _ = vocabulary.mask_of(self._matcher, hide_eos=job.hide_eos)
        if not any(self.first_mask):
            raise GrammarError("it allows no text but the empty one")

    def advance(self, token_ids: list[int]) -> bytes | None:
        """The mask after more tokens; None where the text is complete and nothing but its end may follow."""
        self._matcher.consume_tokens(token_ids)
        _check(self._matcher)
        if self._matcher.is_stopped():
            return None
        mask, goes_on = self._vocabulary.mask_of(self._matcher, hide_eos=self._hide_eos)
        if not goes_on and not self._matcher.is_accepting():
            raise GrammarError(NO_TOKEN)
        return mask if goes_on else None


def main() -> None:
    """Be the first of all these processes, and in its children a grammar."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    vocabulary = Vocabulary(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenizerDefinition))
    # Who is gone while a grammar is made, or before there is any, wants nothing more; there is nobody to be told.
    with suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.send(READY)
        while connections := [
            socket.socket(fileno=number) for number in socket.recv_fds(requests, 1, MAX_SEQUENCES)[1]
        ]:
            if os.fork() == 0:
                requests.close()
                _be_grammar(connections, vocabulary)
                return
            _close(connections)


def _be_grammar(connections: list[socket.socket], vocabulary: Vocabulary) -> None:
    first = connections[0]
    job = first.recv(MAX_MESSAGE)
    if not job:
        return
    try:
        with _time_limit(COMPILE_SECONDS):
            grammar = Grammar(vocabulary, msgspec.msgpack.decode(job, type=GrammarJob))
    except (GrammarError, ValueError) as error:
        first.send(ERROR + str(error).encode())
        return
    first.send(GO + grammar.first_mask)
    _follow(_one_for_each(connections), grammar)


def _one_for_each(connections: list[socket.socket]) -> socket.socket:
    """In as many processes as there are connections, one of them in each."""
    while len(connections) > 1:
        mine = connections.pop()
        if os.fork() == 0:
            _close(connections)
            return mine
        mine.close()
    return connections[0]


def _follow(connection: socket.socket, grammar: Grammar) -> None:
    while message := connection.recv(MAX_MESSAGE):
        connection.send(_answer(grammar, unpack_tokens(message)))


def _answer(grammar: Grammar, token_ids: list[int]) -> bytes:
    try:
        with _time_limit(TOKEN_SECONDS):
            mask = grammar.advance(token_ids)
    except GrammarError as error:
        return ERROR + str(error).encode()
    return COMPLETE if mask is None else GO + mask


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """After so long on the processor the system ends this process, whatever code it is in; a busy machine is no fault."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _definition(job: GrammarJob) -> str:
    if job.kind == "json":
        return LLMatcher.grammar_from_json_schema(job.source, overrides=job.options)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(job.source) if job.kind == "regex" else LLMatcher.grammar_from_lark(job.source)


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    raise GrammarError(NO_TOKEN if error == "NoExtensionBias" else error[:MAX_ERROR])
