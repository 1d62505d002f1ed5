"""The worker processes that run grammars, so that none can delay, crash or starve the daemon.

llguidance bounds most of what a grammar costs, but not all: a few kilobytes of nested rules
overflow its stack, and some intersections of regular expressions take minutes. The system enforces
our limits: a worker whose time is up is killed by its alarm. The daemon then identifies the
grammar that was running and starts the other matchers again in another worker
(driver/grammars/matcher_pool.py).

The fork server builds the tokenizer, once, and forks the workers; driver/grammars/protocol.py
describes their messages. It only waits at its socket, so it ends as soon as the daemon does, and
the kernel kills its children with it. All of them leave by ``os._exit``: a forked interpreter that
unwinds would copy the memory that it shares.
"""

import ctypes
import functools
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from driver.grammars.protocol import (
    ANSWER,
    BEGIN,
    COMPLETE,
    END,
    ENDING,
    ERROR,
    FRAME,
    GO,
    MEMORY_BYTES,
    READY,
    TOKEN,
    TOKENS_AT_ONCE,
    GrammarJob,
    TokenizerDefinition,
    WorkerLimits,
    unpack_beginning,
)

NICENESS = 10
MOST_KILLABLE = b"1000"
"""In oom_score_adj: when memory is short, the kernel kills these processes before any other."""
PR_SET_PDEATHSIG = 1
MAX_LIMITS = 256
"""Bytes of an encoded WorkerLimits at most."""
GRAMMARS_KEPT = 32
"""Compiled grammars that a worker caches."""
MAX_ERROR = 500
"""Characters that we pass on of an error of llguidance, which may quote the grammar."""
NO_TOKEN = "no token of this model can come next"


class GrammarError(Exception):
    """The grammar cannot be compiled, or followed any further; the message is for the client."""


class MaskedTokenizer:
    """The tokenizer, and token masks for the daemon: i32 words, lowest bit first."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        vocab_size, eos = definition.vocab_size, list(definition.eos_token_ids)
        # For a model without an end of text, the tokenizer's own end is never allowed.
        self.tokenizer = LLTokenizer(definition.tokenizer, n_vocab=vocab_size, eos_token=eos or None)
        self._num_bytes = -(-vocab_size // 32) * 4
        self._text = (1 << vocab_size) - 1 & ~sum(1 << token_id for token_id in {*self.tokenizer.eos_tokens})
        """The mask of every token that does not end the text."""
        self._known = (1 << vocab_size) - 1 if eos else self._text

    def mask(self, matcher: LLMatcher, *, hide_eos: bool) -> tuple[bytes, bool]:
        """The tokens that may be next, and whether one of them continues the text."""
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & self._known
        _check(matcher)
        text = allowed & self._text
        shown = text if hide_eos and text else allowed
        return shown.to_bytes(self._num_bytes, "little"), bool(text)


class Grammar:
    """A compiled grammar, of an encoded GrammarJob; raises GrammarError."""

    def __init__(self, tokenizer: MaskedTokenizer, encoded: bytes) -> None:
        job = msgspec.msgpack.decode(encoded, type=GrammarJob)
        limits = LLParserLimits(verbose_errors=False)
        try:
            self._start = LLMatcher(tokenizer.tokenizer, _definition(job), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        _check(self._start)
        self._tokenizer = tokenizer
        self._hide_eos = job.hide_eos
        self.first_mask, _ = tokenizer.mask(self._start, hide_eos=job.hide_eos)
        """The tokens that a text may begin with."""
        if not any(self.first_mask):
            raise GrammarError("it allows no text but the empty one")

    def begin(self) -> "Matcher":
        """A matcher at the start of the text."""
        return Matcher(self._tokenizer, self._start.deep_copy(), hide_eos=self._hide_eos)


class Matcher:
    """The position of one sequence in a grammar."""

    def __init__(self, tokenizer: MaskedTokenizer, matcher: LLMatcher, *, hide_eos: bool) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._hide_eos = hide_eos

    def advance(self, token_ids: list[int]) -> bytes | None:
        """The mask after more tokens; None where only the end of the text may follow."""
        self._matcher.consume_tokens(token_ids)
        _check(self._matcher)
        if self._matcher.is_stopped():
            return None
        mask, continues = self._tokenizer.mask(self._matcher, hide_eos=self._hide_eos)
        if not continues and not self._matcher.is_accepting():
            raise GrammarError(NO_TOKEN)
        return mask if continues else None


def _definition(job: GrammarJob) -> str:
    if job.kind == "json":
        return LLMatcher.grammar_from_json_schema(job.source, overrides=job.options)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(job.source) if job.kind == "regex" else LLMatcher.grammar_from_lark(job.source)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        error = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError(NO_TOKEN if error == "NoExtensionBias" else error[:MAX_ERROR])


def main() -> NoReturn:
    """Runs the fork server, and in its children the workers."""
    with _exiting():
        _restrict()
        tokenizer = MaskedTokenizer(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenizerDefinition))
        requests = socket.socket(fileno=int(sys.argv[1]))
        requests.send(bytes([READY]))
        signal.signal(signal.SIGCHLD, lambda *_: _report_endings(requests))
        _fork_workers(requests, tokenizer)
    raise AssertionError("unreachable")


def _restrict() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(NICENESS)
    # a container may not have it
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(MOST_KILLABLE)


@contextmanager
def _exiting() -> Iterator[None]:
    """Exits from this process at the end of the block, however that comes."""
    code = 1
    try:
        yield
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0  # the daemon has ended, or needs this process no more
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


def _fork_workers(requests: socket.socket, tokenizer: MaskedTokenizer) -> None:
    fork_server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_LIMITS, 1)
        if not message:
            return
        # none if this process has no descriptor left: the daemon sees the socket closed
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                if os.fork() == 0:
                    with _exiting():
                        _die_with(fork_server)
                        requests.close()
                        limits = msgspec.msgpack.decode(message, type=WorkerLimits)
                        _FrameLoop(connection, tokenizer, limits).run()


def _report_endings(requests: socket.socket) -> None:
    """Reaps the children that have ended and reports how; a report may be lost."""
    with suppress(ChildProcessError, OSError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process_id, status = ended
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            requests.send(ENDING.pack(process_id, by), socket.MSG_DONTWAIT)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise EOFError("the fork server has ended")


class _FrameLoop:
    """A worker: answers one frame after the other."""

    def __init__(self, connection: socket.socket, tokenizer: MaskedTokenizer, limits: WorkerLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._compiled = functools.lru_cache(GRAMMARS_KEPT)(functools.partial(Grammar, tokenizer))
        self._matchers: dict[int, Matcher] = {}

    def run(self) -> None:
        """Runs until the daemon closes the socket; raises EOFError or an OSError then."""
        frames = self._connection.makefile("rb")
        self._connection.sendall(ANSWER.pack(0, os.getpid(), READY, 0, 0))
        while True:
            length, number, kind = FRAME.unpack(_read(frames, FRAME.size))
            body = _read(frames, length)
            if kind == END:
                self._matchers.pop(number, None)
            else:
                self._answer(number, self._begin if kind == BEGIN else self._advance, body)

    def _answer(self, number: int, work: Callable[[int, bytes], bytes | None], body: bytes) -> None:
        began, size = time.process_time(), _peak_size()
        try:
            mask = work(number, body)
            kind, answer = (COMPLETE, b"") if mask is None else (GO, mask)
        except GrammarError as error:
            kind, answer = ERROR, str(error).encode(errors="replace")
        spent, grown = round(1e6 * (time.process_time() - began)), _peak_size() - size
        self._connection.sendall(ANSWER.pack(len(answer), number, kind, spent, grown) + answer)

    def _begin(self, number: int, body: bytes) -> bytes | None:
        job, token_ids = unpack_beginning(body)
        with _time_limit(self._limits.compile_seconds):
            grammar = self._compiled(job)
            self._matchers[number] = grammar.begin()
        return self._consume(number, token_ids) if token_ids else grammar.first_mask

    def _advance(self, number: int, body: bytes) -> bytes | None:
        return self._consume(number, [token_id for (token_id,) in TOKEN.iter_unpack(body)])

    def _consume(self, number: int, token_ids: list[int]) -> bytes | None:
        with _time_limit(self._limits.token_seconds * (1 + len(token_ids) // TOKENS_AT_ONCE)):
            return self._matchers[number].advance(token_ids)


def _read(frames: BinaryIO, length: int) -> bytes:
    data = frames.read(length)
    if len(data) < length:
        raise EOFError("the daemon has ended")
    return data


def _peak_size() -> int:
    """The most memory that this process has used at a time, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Has the system kill this process after so much processor time, whatever it does."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
