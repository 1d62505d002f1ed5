"""The processes that grammars run in: a few workers, so that no grammar can hold up, crash or starve the daemon.

llguidance bounds most of what a grammar costs, but not all of it: a few kilobytes of nested rules overflow its stack, and
some intersections of regular expressions take it minutes. So grammars are compiled and followed in processes of their
own, within limits that the system enforces: a worker whose time is up is ended by its alarm. The daemon finds the grammar
that was in work then, and has the matchers of the others begin anew elsewhere (driver/grammars/grammar_followers.py).

The first process builds the tokenizer, once, and forks the workers; driver/grammars/grammar_protocol.py has what they say. It has
nothing else to do than to look at its socket, so it ends at once when the daemon does, and the kernel ends its children
with it. They leave by ``os._exit``: a forked interpreter that unwinds copies the memory that it shares.
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

from driver.grammars.grammar_matcher import Grammar, GrammarError, Matcher, Vocabulary
from driver.grammars.grammar_protocol import (
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
    TokenizerDefinition,
    WorkerLimits,
    unpack_beginning,
)

NICENESS = 10
MOST_KILLABLE = b"1000"
"""In oom_score_adj: where memory is short, these processes go before any other."""
PR_SET_PDEATHSIG = 1
MAX_LIMITS = 256
"""Bytes of an encoded WorkerLimits at most."""
GRAMMARS_KEPT = 32
"""Compiled grammars that a worker keeps for whoever begins one next."""


def main() -> NoReturn:
    """Be the first of all these processes, and in its children a worker."""
    with _ending_the_process():
        _restrict()
        vocabulary = Vocabulary(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenizerDefinition))
        requests = socket.socket(fileno=int(sys.argv[1]))
        requests.send(bytes([READY]))
        signal.signal(signal.SIGCHLD, lambda *_: _report_ends(requests))
        _fork_workers(requests, vocabulary)
    raise AssertionError("unreachable")


def _restrict() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:  # a container may have none of that
        file.write(MOST_KILLABLE)


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """Whatever happens within is the end of this process, on the spot."""
    code = 1
    try:
        yield
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0  # the daemon is gone or wants nothing more
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


def _fork_workers(requests: socket.socket, vocabulary: Vocabulary) -> None:
    first = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_LIMITS, 1)
        if not message:
            return
        for descriptor in descriptors:  # none, where this process may have no more: the daemon sees it closed
            with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                if os.fork() == 0:
                    with _ending_the_process():
                        _die_with(first)
                        requests.close()
                        limits = msgspec.msgpack.decode(message, type=WorkerLimits)
                        _Worker(connection, vocabulary, limits).serve()


def _report_ends(requests: socket.socket) -> None:
    """Wait for no child, but say of each that has ended how; what the daemon does not read it can do without."""
    with suppress(ChildProcessError, OSError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process_id, status = ended
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            requests.send(ENDING.pack(process_id, by), socket.MSG_DONTWAIT)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise EOFError("the first process has ended")


class _Worker:
    """Answers frames, one after the other."""

    def __init__(self, connection: socket.socket, vocabulary: Vocabulary, limits: WorkerLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._compiled = functools.lru_cache(GRAMMARS_KEPT)(functools.partial(Grammar, vocabulary))
        self._matchers: dict[int, Matcher] = {}

    def serve(self) -> None:
        """Until the daemon closes the socket; raises EOFError or an OSError then."""
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
            how, answer = (COMPLETE, b"") if mask is None else (GO, mask)
        except GrammarError as error:
            how, answer = ERROR, str(error).encode(errors="replace")
        spent, grown = round(1e6 * (time.process_time() - began)), _peak_size() - size
        self._connection.sendall(ANSWER.pack(len(answer), number, how, spent, grown) + answer)

    def _begin(self, number: int, body: bytes) -> bytes | None:
        job, token_ids = unpack_beginning(body)
        with _time_limit(self._limits.compile_seconds):
            grammar = self._compiled(job)
            self._matchers[number] = grammar.begin()
        return self._follow(number, token_ids) if token_ids else grammar.first_mask

    def _advance(self, number: int, body: bytes) -> bytes | None:
        return self._follow(number, [token_id for (token_id,) in TOKEN.iter_unpack(body)])

    def _follow(self, number: int, token_ids: list[int]) -> bytes | None:
        with _time_limit(self._limits.token_seconds * (1 + len(token_ids) // TOKENS_AT_ONCE)):
            return self._matchers[number].advance(token_ids)


def _read(frames: BinaryIO, length: int) -> bytes:
    data = frames.read(length)
    if len(data) < length:
        raise EOFError("the daemon is gone")
    return data


def _peak_size() -> int:
    """KiB of memory that this process had in use at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """After so long on the processor the system ends this process, whatever code it is in; a busy machine is no fault."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
