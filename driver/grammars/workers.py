"""The daemon's side of the worker processes: starts them, talks to them and ends them."""

import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from driver.errors import DriverStopped, InternalError, Overloaded
from driver.grammars.protocol import ANSWER, ENDING, FRAME, READY, TokenizerDefinition, WorkerLimits

logger = logging.getLogger(__name__)

PROGRAM = "import sys; sys.path[:] = {path!r}; from driver.grammars.worker_process import main; main()"
FORK_SERVER_TIMEOUT, WORKER_TIMEOUT = 40.0, 10.0
"""Seconds for the fork server to build the tokenizer, and for a worker to be forked from it."""
MAX_ENDINGS = 256
"""Ended workers to remember: their endings are asked for at once, or never."""
RECEIVED_AT_ONCE = 1 << 18
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS}


class WorkerLost(Exception):
    """The worker has ended."""


class Answer(NamedTuple):
    """A worker's answer about a matcher; ``kind`` is GO, COMPLETE or ERROR."""

    number: int
    kind: int
    seconds: float
    """Processor time that it took."""
    grown: int
    """KiB by which the worker's peak size has grown."""
    body: bytes


class Worker:
    """The connection to one worker, for one thread; another may ``shut_down``."""

    def __init__(self, connection: socket.socket, when_closed: Callable[["Worker"], None]) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._when_closed = when_closed
        self._unsent = bytearray()
        self._received = bytearray()
        self.process_id: int | None = None
        """None until the worker is ready."""

    def fileno(self) -> int:
        """Readable when an answer has come."""
        return self._connection.fileno()

    def send(self, number: int, kind: int, body: bytes = b"") -> bool:
        """Sends a frame, or the rest of it later; False if the worker has ended."""
        self._unsent += FRAME.pack(len(body), number, kind) + body
        return self._flush()

    def receive(self) -> list[Answer]:
        """The answers that have come; raises WorkerLost once no more will come."""
        self._flush()
        try:
            while data := self._connection.recv(RECEIVED_AT_ONCE):
                self._received += data
        except BlockingIOError:
            return list(self._answers())
        except OSError:
            data = b""
        if answers := list(self._answers()):
            return answers  # the next call finds the end again
        raise WorkerLost

    def next_answer(self, timeout: float) -> Answer:
        """Waits for the answer to the one frame sent; raises WorkerLost and TimeoutError."""
        while not (answers := self.receive()):
            if not self._poll(timeout, select.POLLIN | (select.POLLOUT if self._unsent else 0)):
                raise TimeoutError
        return answers[0]

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the worker has started; False if it has not after ``timeout`` seconds."""
        with suppress(WorkerLost):
            while self.process_id is None and self._poll(timeout, select.POLLIN):
                self.receive()
        return self.process_id is not None

    def shut_down(self) -> None:
        """Ends the worker, from any thread; ``close`` is still to be called."""
        with suppress(OSError):  # it may be closed meanwhile
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the worker; a second time changes nothing."""
        self._connection.close()
        self._when_closed(self)

    def _poll(self, timeout: float, events: int) -> bool:
        poll = select.poll()
        poll.register(self._connection, events)
        return bool(poll.poll(1000 * timeout))

    def _flush(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent.clear()
            return False
        return True

    def _answers(self) -> Iterator[Answer]:
        while len(self._received) >= ANSWER.size:
            length, number, kind, spent, grown = ANSWER.unpack_from(self._received)
            end = ANSWER.size + length
            if len(self._received) < end:
                return
            body = bytes(self._received[ANSWER.size : end])
            del self._received[:end]
            if kind == READY:
                self.process_id = number
            else:
                yield Answer(number, kind, spent / 1e6, grown, body)


class Workers:
    """Starts workers, by a fork server that it starts when needed. For any thread."""

    def __init__(self, definition: Callable[[], TokenizerDefinition]) -> None:
        self._definition = definition
        self._lock = threading.Lock()  # of the fork server, which may take seconds to start
        self._fork_server: _WorkerForkServer | None = None
        self._open: set[Worker] = set()
        self._signals: dict[int, int] = {}
        """Signals, or 0, by process id of workers that have ended; under the lock."""
        self.stopped = False

    def start(self, limits: WorkerLimits) -> Worker:
        """A new worker, when it is ready. Raises Overloaded or another DriverError."""
        with self._lock, _shortages_are_overload():
            worker = self._fork(limits)
        if worker.wait_ready(WORKER_TIMEOUT):
            return worker
        worker.close()
        self._check_running()
        raise Overloaded("no process can be started for a grammar now: try again later")

    def start_at_once(self, limits: WorkerLimits) -> Worker | None:
        """A new worker if that takes no waiting; otherwise starts the fork server for later."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._fork_server is not None and not self._fork_server.has_ended:
                with suppress(OSError, DriverStopped):
                    return self._fork(limits)
            elif not self.stopped:
                threading.Thread(target=self._restart, name="start grammars", daemon=True).start()
        finally:
            self._lock.release()
        return None

    def signal_of(self, process_id: int) -> int | None:
        """The signal that ended a worker, 0 if it exited; None if that is not known (yet)."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._fork_server is not None:
                self._signals.update(self._fork_server.endings())
            while len(self._signals) > MAX_ENDINGS:
                del self._signals[next(iter(self._signals))]
            return self._signals.get(process_id)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Ends all workers and the fork server; threads that wait for a worker get WorkerLost."""
        self.stopped = True
        for worker in list(self._open):
            worker.shut_down()
        with self._lock:
            if self._fork_server is not None:
                self._fork_server.stop()
                self._fork_server = None

    def close(self) -> None:
        """Closes the connections; only after ``stop``, when no other thread uses a worker."""
        for worker in list(self._open):
            worker.close()

    def _restart(self) -> None:
        with suppress(OSError, DriverStopped, InternalError), self._lock:
            self._ensure_fork_server()

    def _fork(self, limits: WorkerLimits) -> Worker:
        worker = Worker(self._ensure_fork_server().fork(limits), self._open.discard)
        self._open.add(worker)
        if self.stopped:
            worker.shut_down()
        return worker

    def _ensure_fork_server(self) -> "_WorkerForkServer":
        self._check_running()
        if self._fork_server is not None and self._fork_server.has_ended:
            self._fork_server.stop()
            self._fork_server = None
        if self._fork_server is None:
            self._fork_server = _WorkerForkServer(self._definition())
        return self._fork_server

    def _check_running(self) -> None:
        if self.stopped:
            raise DriverStopped("the driver is stopped")


class _WorkerForkServer:
    """The process that workers are forked from. It has the import path of this one."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM.format(path=sys.path), str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the daemon
                )
        except BaseException:
            self._requests.close()
            raise
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(definition))
        if not self._wait_ready():
            self.stop()
            raise InternalError("the process that compiles grammars cannot start; the daemon's log says why")
        self._requests.setblocking(False)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, limits: WorkerLimits) -> socket.socket:
        """Our end of a new worker's socket, at once. Raises an OSError where there is none."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [msgspec.msgpack.encode(limits)], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def endings(self) -> Iterator[tuple[int, int]]:
        """The workers that have ended since the last call: process id, and signal or 0."""
        with suppress(OSError):
            while message := self._requests.recv(ENDING.size):
                yield ENDING.unpack(message)

    def stop(self) -> None:
        """Kills it, and with it its children."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def _wait_ready(self) -> bool:
        self._requests.settimeout(FORK_SERVER_TIMEOUT)
        try:
            return self._requests.recv(1) == bytes([READY])
        except OSError as error:
            logger.error("the process that compiles grammars is not ready: %s", error)
            return False


@contextmanager
def _shortages_are_overload() -> Iterator[None]:
    """Turns an OSError for what the system has run out of into Overloaded."""
    try:
        yield
    except ConnectionError as error:
        raise Overloaded("the process that compiles grammars has just ended: try again") from error
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        why = os.strerror(error.errno)
        raise Overloaded(f"no process can be started for a grammar now ({why.lower()}): try again later") from error
