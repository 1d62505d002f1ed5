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
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NoReturn

import msgspec

from driver.grammars.matcher import AHEAD_SECONDS, Grammar, GrammarError, MaskedTokenizer, Matcher
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
    TOKENS_AT_ONCE,
    TokenizerDefinition,
    WayOn,
    WorkerLimits,
    pack,
    unpack_advance,
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
                self._answer(number, kind, body)

    def _answer(self, number: int, frame: int, body: bytes) -> None:
        began, size = time.process_time(), _peak_size()
        try:
            mask, guess = self._begin(number, body) if frame == BEGIN else self._advance(number, body)
            quick = frame == BEGIN or time.process_time() - began < AHEAD_SECONDS
            kind, answer = (COMPLETE, b"") if mask is None else (GO, self._way_on(number, mask, guess, ahead=quick))
        except GrammarError as error:
            kind, answer = ERROR, str(error).encode(errors="replace")
        spent, grown = round(1e6 * (time.process_time() - began)), _peak_size() - size
        self._connection.sendall(ANSWER.pack(len(answer), number, kind, spent, grown) + answer)

    def _begin(self, number: int, body: bytes) -> tuple[bytes | None, list[int]]:
        """The mask behind the tokens of a frame, and its guesses."""
        beginning = unpack_beginning(body)
        token_ids = array("I", beginning.tokens).tolist()
        with _time_limit(self._limits.compile_seconds):
            grammar = self._compiled(beginning.job)
            self._matchers[number] = grammar.begin(beginning.num_drafts)
        return (self._consume(number, token_ids) if token_ids else grammar.first_mask), []

    def _advance(self, number: int, body: bytes) -> tuple[bytes | None, list[int]]:
        advance = unpack_advance(body)
        return self._consume(number, advance.token_ids), advance.guess

    def _way_on(self, number: int, mask: bytes, guess: list[int], *, ahead: bool) -> bytes:
        """``ahead`` is whether to look there: a grammar that is slow is not asked for more."""
        way = WayOn(mask, [], 0, [])
        if ahead:
            with _time_limit(self._limits.token_seconds):
                expected, num_forced, masks = self._matchers[number].look_ahead(guess)
            way = WayOn(mask, expected, num_forced, masks)
        return pack(way)

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
