"""How the processes that grammars run in start, and end."""

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from driver.errors import DriverStopped, InternalError, Overloaded
from driver.grammars.grammar_protocol import ENDING, READY, TokenizerDefinition, WorkerLimits
from driver.grammars.grammar_worker import Worker

logger = logging.getLogger(__name__)

PROGRAM = "import sys; sys.path[:] = {path!r}; from driver.grammars.grammar_process import main; main()"
FIRST_PATIENCE, WORKER_PATIENCE = 40.0, 10.0
"""Seconds for the first process to build the tokenizer, and for another to be forked from it."""
MAX_ENDINGS = 256
"""Ends of workers to remember: they are asked for at once, or never."""
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS}


class WorkerSource:
    """Starts workers, from a first process that starts when it is needed. Any thread may call any method."""

    def __init__(self, definition: Callable[[], TokenizerDefinition]) -> None:
        self._definition = definition
        self._lock = threading.Lock()  # of the first process, which may take seconds to start
        self._first: _FirstProcess | None = None
        self._workers: set[Worker] = set()
        self._ended_by: dict[int, int] = {}
        """Signals, or 0, by process id of workers that have ended; under the lock."""
        self.stopped = False

    def worker(self, limits: WorkerLimits) -> Worker:
        """A new worker; waits for it, for seconds where it is the first. Raises Overloaded and other DriverErrors."""
        with self._lock, _shortages_are_overload():
            worker = self._fork(limits)
        if worker.wait_ready(WORKER_PATIENCE):
            return worker
        worker.close()
        self._check_going()
        raise Overloaded("no process can be started for a grammar now: try again later")

    def worker_at_once(self, limits: WorkerLimits) -> Worker | None:
        """A new worker, if that needs no waiting; if not, somebody sees to it that it will soon."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._first is not None and not self._first.has_ended:
                with suppress(OSError, DriverStopped):
                    return self._fork(limits)
            elif not self.stopped:
                threading.Thread(target=self._revive, name="start grammars", daemon=True).start()
        finally:
            self._lock.release()
        return None

    def ended_by(self, process_id: int) -> int | None:
        """The signal that ended a worker, 0 for an end of its own; None if that is not known (yet)."""
        if self._lock.acquire(blocking=False):
            try:
                if self._first is not None:
                    self._ended_by.update(self._first.endings())
                while len(self._ended_by) > MAX_ENDINGS:
                    del self._ended_by[next(iter(self._ended_by))]
                return self._ended_by.get(process_id)
            finally:
                self._lock.release()
        return None

    def stop(self) -> None:
        """Ends all of the processes; who waits for one hears that it is gone."""
        self.stopped = True
        for worker in list(self._workers):
            worker.hang_up()
        with self._lock:
            if self._first is not None:
                self._first.stop()
                self._first = None

    def close(self) -> None:
        """After ``stop``, when no other thread uses a worker: closes what is left of them."""
        for worker in list(self._workers):
            worker.close()

    def _revive(self) -> None:
        """Have a first process again."""
        with suppress(OSError, DriverStopped, InternalError), self._lock:
            self._ensure_first()

    def _fork(self, limits: WorkerLimits) -> Worker:
        first = self._ensure_first()
        worker = Worker(first.fork(limits), self._workers.discard)
        self._workers.add(worker)
        if self.stopped:
            worker.hang_up()
        return worker

    def _ensure_first(self) -> "_FirstProcess":
        self._check_going()
        if self._first is not None and self._first.has_ended:
            self._first.stop()
            self._first = None
        if self._first is None:
            self._first = _FirstProcess(self._definition())
        return self._first

    def _check_going(self) -> None:
        if self.stopped:
            raise DriverStopped("the driver is stopped")


class _FirstProcess:
    """The process that workers are forked from. It has the import path of this one."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM.format(path=sys.path), str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the daemon's to handle
                )
        except BaseException:
            self._requests.close()
            raise
        self._tell(definition)
        if not self._is_ready():
            self.stop()
            raise InternalError("the process that compiles grammars cannot start; the daemon's log says why")
        self._requests.setblocking(False)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, limits: WorkerLimits) -> socket.socket:
        """Our end of a new worker's socket, at once. Raises an OSError where it cannot be had."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [msgspec.msgpack.encode(limits)], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def endings(self) -> Iterator[tuple[int, int]]:
        """Of the workers that have ended since the last call: process id, and signal or 0."""
        with suppress(OSError):
            while message := self._requests.recv(ENDING.size):
                yield ENDING.unpack(message)

    def stop(self) -> None:
        """End it, and with it its children."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        self._requests.settimeout(FIRST_PATIENCE)
        try:
            return self._requests.recv(1) == bytes([READY])
        except OSError as error:
            logger.error("the process that compiles grammars is not ready: %s", error)
            return False

    def _tell(self, definition: TokenizerDefinition) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(definition))


@contextmanager
def _shortages_are_overload() -> Iterator[None]:
    """What the system has no more of is nobody's fault."""
    try:
        yield
    except ConnectionError as error:
        raise Overloaded("the process that compiles grammars has just ended: try again") from error
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        why = os.strerror(error.errno)
        raise Overloaded(f"no process can be started for a grammar now ({why.lower()}): try again later") from error
