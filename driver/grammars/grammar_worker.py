"""The daemon's line to one of the processes that grammars run in."""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from driver.grammars.grammar_protocol import ANSWER, FRAME, READY

RECEIVED_AT_ONCE = 1 << 18


class WorkerLost(Exception):
    """The worker has ended."""


class Answer(NamedTuple):
    """What a worker says of a matcher; ``how`` is GO, COMPLETE or ERROR."""

    number: int
    how: int
    seconds: float
    """Processor time that it took."""
    grown: int
    """KiB by which the worker is larger than ever before."""
    body: bytes


class Worker:
    """A line to one worker, which never waits unless it is told to. One thread uses it; another may ``hang_up``."""

    def __init__(self, connection: socket.socket, when_closed: Callable[["Worker"], None]) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._when_closed = when_closed
        self._unsent = bytearray()
        self._received = bytearray()
        self.process_id: int | None = None
        """None until it is ready."""

    def fileno(self) -> int:
        """Readable when an answer is there."""
        return self._connection.fileno()

    def send(self, number: int, kind: int, body: bytes = b"") -> bool:
        """Whether a frame is on its way, or will be once the worker reads; otherwise ``receive`` will raise."""
        self._unsent += FRAME.pack(len(body), number, kind) + body
        return self._flush()

    def receive(self) -> list[Answer]:
        """The answers that are there; raises WorkerLost once there will be none."""
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
        """Wait for the answer to the one frame that was sent; raises WorkerLost, and TimeoutError after so many seconds."""
        while not (answers := self.receive()):
            if not self._has_come(timeout, select.POLLIN | (select.POLLOUT if self._unsent else 0)):
                raise TimeoutError
        return answers[0]

    def wait_ready(self, timeout: float) -> bool:
        """Whether it has started; waits for that, but no longer than so many seconds."""
        with suppress(WorkerLost):
            while self.process_id is None and self._has_come(timeout, select.POLLIN):
                self.receive()
        return self.process_id is not None

    def hang_up(self) -> None:
        """Have the worker end; from another thread, too."""
        with suppress(OSError):  # it may be closed meanwhile
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the worker; a second time changes nothing."""
        self._connection.close()
        self._when_closed(self)

    def _has_come(self, timeout: float, events: int) -> bool:
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
            length, number, how, spent, grown = ANSWER.unpack_from(self._received)
            end = ANSWER.size + length
            if len(self._received) < end:
                return
            body = bytes(self._received[ANSWER.size : end])
            del self._received[:end]
            if how == READY:
                self.process_id = number
            else:
                yield Answer(number, how, spent / 1e6, grown, body)
