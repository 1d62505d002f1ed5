"""Records of a socket's process that have been read and not yet heard: connections take turns."""

from collections import OrderedDict, deque

from ipc.sockets.link import Record

RECORD_BYTES = 256
"""Memory that a record takes besides its body, about."""


class TurnsOfConnections:
    """Each connection's records keep their order, and it has its next turn behind all others.

    Records of no connection, of serial 0, take turns with the others.
    """

    def __init__(self) -> None:
        self._by_serial: OrderedDict[int, deque[Record]] = OrderedDict()
        """Next turn first; no queue is empty."""
        self.num_bytes = 0
        """Memory that they take, about."""

    def __bool__(self) -> bool:
        return bool(self._by_serial)

    def put(self, record: Record) -> None:
        """Queue a record behind those of its connection."""
        _, serial, body = record
        self.num_bytes += len(body) + RECORD_BYTES
        self._by_serial.setdefault(serial, deque()).append(record)

    def next(self) -> Record:
        """The oldest record of the connection whose turn it is; there must be one."""
        serial, records = self._by_serial.popitem(last=False)
        record = records.popleft()
        if records:
            self._by_serial[serial] = records
        self.num_bytes -= len(record[2]) + RECORD_BYTES
        return record

    def clear(self) -> None:
        """Forget all."""
        self._by_serial.clear()
        self.num_bytes = 0
