"""Records between the daemon and a socket's process, over a stream that never blocks."""

import socket
import struct
from enum import IntEnum
from typing import TypedDict

_HEADER = struct.Struct("<IBQ")
"""Bytes of the body, kind, and the serial of the connection that it is about."""
_CHUNK = 256 * 1024
"""Bytes sent or received by one system call."""

Record = tuple[int, int, bytes]
"""Kind, serial and body."""


class LinkLost(Exception):
    """The other end is gone."""


class Kind(IntEnum):
    """The kinds of records. Serial and body are 0 and empty unless described."""

    CONFIGURE = 1
    """To the process, as the first: its SocketConfiguration, in JSON."""
    OPEN = 2
    """To the process: read what clients say."""
    MESSAGE = 3
    """Either way: one frame of the connection ``serial``."""
    CLOSE = 4
    """To the process: close this connection, after it had time to read its last messages."""
    KEYS = 5
    """To the process: the keys that may connect, in JSON; it confirms with the same kind."""
    BEAT = 6
    """To the process; answered by the same kind."""
    STOP = 7
    """To the process: let the last messages leave, and end."""
    OPENED = 8
    """From the process: a connection has sent its first message; Who, in JSON."""
    PARTS = 9
    """From the process: a message of several frames, which are none of the daemon's business."""
    TAKEN = 10
    """From the process: messages sent into the connection since the last of these, and their bytes, in
    decimal."""
    GONE = 11
    """From the process: this connection has ended, and its serial is never used again."""


class Who(TypedDict):
    """The peer of a connection: its key, the user of an ``ipc://`` socket as the kernel reports
    it, and an error's code and message if it is not served."""

    key: str | None
    uid: int | None
    refusal: tuple[str, str] | None


class Link:
    """One end of a stream socket. One thread uses it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK))  # used again: a new one of this size takes 20 us to map

    def fileno(self) -> int:
        """A file descriptor, readable when there are records or the other end is gone."""
        return self._end.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait for ``flush``."""
        return len(self._unsent)

    def put(self, kind: Kind, serial: int = 0, body: bytes = b"") -> None:
        """Add a record to what ``flush`` sends."""
        self._unsent += _HEADER.pack(len(body), kind, serial)
        self._unsent += body

    def flush(self) -> None:
        """Send as much as there is room for. A lost peer shows in ``receive``."""
        while self._unsent:
            try:
                with memoryview(self._unsent) as unsent, unsent[:_CHUNK] as chunk:
                    sent = self._end.send(chunk)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Record]:
        """The complete records, perhaps none. Raises LinkLost once the other end is gone."""
        try:
            size = self._end.recv_into(self._chunk)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost from error
        if not size:
            raise LinkLost
        self._received += self._chunk[:size]
        return self._complete()

    def close(self) -> None:
        """Close this end; a second time changes nothing."""
        self._end.close()

    def _complete(self) -> list[Record]:
        records, begin, end = [], 0, len(self._received)
        while begin + _HEADER.size <= end:
            length, kind, serial = _HEADER.unpack_from(self._received, begin)
            body = begin + _HEADER.size
            if body + length > end:
                break
            records.append((kind, serial, bytes(self._received[body : body + length])))
            begin = body + length
        del self._received[:begin]
        return records
