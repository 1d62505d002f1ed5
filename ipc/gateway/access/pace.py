"""The minimum rate of a peer that sends a body or reads an answer. No clock, timer or socket here.

Times are in seconds, and the caller's.
"""

BODY_TIMEOUT, BODY_RATE = 30.0, 64 << 10
"""Seconds that a body has to arrive in, plus one for each BYTES_PER_SECOND that have arrived."""
SEND_TIMEOUT, SEND_BYTES, SEND_PERIODS = 30.0, 32 << 10, 20
"""Seconds in which a reader must take each part of a waiting answer, or its proportion."""


class BodyPace:
    """Of one body, from the end of its head."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._num_bytes = 0

    def receive(self, num_bytes: int) -> None:
        """Some of it has come."""
        self._num_bytes += num_bytes

    def deadline(self) -> float:
        """The deadline as of now."""
        return self._began + BODY_TIMEOUT + self._num_bytes / BODY_RATE


class SendPace:
    """Bytes that wait to be sent, since the connection took no more."""

    def __init__(self, num_waiting: int) -> None:
        self._num_waiting = num_waiting
        self._least = max(SEND_BYTES, num_waiting // SEND_PERIODS)

    def is_too_slow(self, num_waiting: int) -> bool:
        """Whether too little has left since this was last asked, which was SEND_TIMEOUT ago."""
        num_sent, self._num_waiting = self._num_waiting - num_waiting, num_waiting
        return num_waiting > 0 and num_sent < self._least
