"""From structured outputs, as a client asks for them, to the constraints of its sequences."""

import socket
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from driver.errors import DriverStopped, InternalError, InvalidRequest
from driver.grammar_jobs import grammar_job
from driver.grammar_protocol import (
    COMPILE_SECONDS,
    COMPLETE,
    ERROR,
    MAX_MESSAGE,
    MEMORY_BYTES,
    READY,
    TOKEN_SECONDS,
    TOKENS_AT_ONCE,
    TokenizerDefinition,
    pack_tokens,
)
from driver.tokenizer import Tokenizer
from engine.config import ServingLimits
from engine.structured_outputs import StructuredOutputsParams

SEND_BUFFER = 1 << 20
PROGRAM = "import sys; sys.path[:] = {path!r}; from driver.grammar_process import main; main()"


class Grammars:
    """Compiles grammars, in processes of which the first starts when it is needed. Any thread may call any method."""

    def __init__(self, tokenizer: Tokenizer, limits: ServingLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._lock = threading.Lock()  # one process is enough, however many want it at once
        self._process: _FirstProcess | None = None
        self._constraints: set[GrammarConstraint] = set()
        self._stopped = False

    def compile(
        self, params: StructuredOutputsParams, *, hide_eos: bool = False, count: int = 1
    ) -> list["GrammarConstraint"]:
        """So many constraints of one grammar, each at its start. Waits for seconds at most; raises a DriverError.

        ``hide_eos`` forbids the end of the text wherever it may go on.
        """
        job = msgspec.msgpack.encode(grammar_job(params, hide_eos=hide_eos))
        constraints = self._new_constraints(count)
        try:
            mask = self._mask(constraints[0].ask(job), f"structured_outputs.{params.form}")
        except BaseException:
            for constraint in constraints:
                constraint.close()
            raise
        for constraint in constraints:
            constraint.mask = mask
        return constraints

    def stop(self) -> None:
        """Ends all of the processes; who waits for one hears that it is gone."""
        with self._lock:
            self._stopped = True
            for constraint in list(self._constraints):
                constraint.hang_up()
            if self._process is not None:
                self._process.stop()
                self._process = None

    def close(self) -> None:
        """After ``stop``, when no other thread has a constraint in use: closes what is left of them."""
        for constraint in list(self._constraints):
            constraint.close()

    def _mask(self, answer: bytes, name: str) -> NDArray[np.int32]:
        if answer.startswith(ERROR):
            raise InvalidRequest(f"{name}: {answer[1:].decode()}")
        if answer:
            return np.frombuffer(answer, np.int32, offset=1)
        if self._stopped:
            raise DriverStopped("the driver is stopped")
        limits = f"{COMPILE_SECONDS:g} seconds, {MEMORY_BYTES >> 30} GiB and a moderate depth of nesting"
        raise InvalidRequest(f"{name} cannot be compiled within {limits}: make it simpler")

    def _new_constraints(self, count: int) -> list["GrammarConstraint"]:
        with self._lock:
            if self._stopped:
                raise DriverStopped("the driver is stopped")
            if self._process is not None and self._process.has_ended:
                self._process.stop()
                self._process = None
            if self._process is None:
                self._process = _FirstProcess(
                    TokenizerDefinition(
                        self._tokenizer.definition(), self._limits.vocab_size, self._limits.eos_token_ids
                    )
                )
            constraints = [GrammarConstraint(ours, self._constraints) for ours in self._process.new_grammar(count)]
            self._constraints.update(constraints)
        return constraints


class _FirstProcess:
    """The process that those of all grammars are forked from. It has the import path of this one."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=sys.path), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the daemon's to handle
            )
        self._tell(definition)
        if self._requests.recv(1) != READY:
            self.stop()
            raise InternalError("the process that compiles grammars cannot start; the daemon's log says why")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def new_grammar(self, count: int) -> list[socket.socket]:
        """Our ends of so many sequences' sockets; raises InternalError if the process has just ended."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        theirs = [their for _, their in pairs]
        try:
            socket.send_fds(self._requests, [b"g"], [their.fileno() for their in theirs])
        except ConnectionError as error:
            for ours, _ in pairs:
                ours.close()
            raise InternalError("the process that compiles grammars has ended; try again") from error
        finally:
            for their in theirs:
                their.close()
        return [ours for ours, _ in pairs]

    def stop(self) -> None:
        """End it; its children end with their sockets."""
        self._requests.close()
        self._process.terminate()
        self._process.wait()

    def _tell(self, definition: TokenizerDefinition) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(definition))


class GrammarConstraint:
    """The TokenConstraint of one sequence: a socket, behind which its grammar is followed. One thread uses it."""

    def __init__(self, connection: socket.socket, registry: "set[GrammarConstraint]") -> None:
        self.mask: NDArray[np.int32] = np.empty(0, np.int32)
        self.complete = False
        self.error: str | None = None
        self._connection = connection
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._registry = registry

    def ask(self, job: bytes) -> bytes:
        """Wait for the answer to a grammar; empty if there is nobody to give it."""
        try:
            self._connection.send(job)
            return self._connection.recv(MAX_MESSAGE)
        except ConnectionError:
            return b""

    def advance(self, token_id: int) -> None:
        """One more token; returns at once. If nobody is there to read it, ``hear`` will tell."""
        self._tell([token_id])

    def replay(self, token_ids: list[int]) -> None:
        """Tokens that an earlier request has got; waits for all answers but the last, which is heard as any other's."""
        last = (len(token_ids) - 1) // TOKENS_AT_ONCE * TOKENS_AT_ONCE
        for start in range(0, last, TOKENS_AT_ONCE):
            self.ask(pack_tokens(token_ids[start : start + TOKENS_AT_ONCE]))
        self._tell(token_ids[last:])

    def hear(self) -> bool:
        """Whether the answer to the last token has come; returns at once."""
        try:
            answer = self._connection.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            answer = b""
        if not answer:
            limits = f"{TOKEN_SECONDS:g} second or {MEMORY_BYTES >> 30} GiB"
            self.error = f"structured_outputs: it takes more than {limits} to tell what may come next: make it simpler"
        elif answer.startswith(ERROR):
            self.error = f"structured_outputs: {answer[1:].decode()}"
        elif answer.startswith(COMPLETE):
            self.complete = True
        else:
            self.mask = np.frombuffer(answer, np.int32, offset=1)
        return True

    def fileno(self) -> int:
        """Readable when the answer is there."""
        return self._connection.fileno()

    def _tell(self, token_ids: list[int]) -> None:
        with suppress(ConnectionError):
            self._connection.send(pack_tokens(token_ids), socket.MSG_DONTWAIT)

    def hang_up(self) -> None:
        """End the process behind it; from another thread, too."""
        with suppress(OSError):  # it may be closed meanwhile
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process behind it; a second time changes nothing."""
        self._connection.close()
        self._registry.discard(self)
