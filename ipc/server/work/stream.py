"""The messages of one request that wait for its client: the protocol's flow control."""

import math
from collections.abc import Callable

import msgspec

from driver.request import ReturnSample
from ipc.server.outbox import Reply, joined
from ipc.sockets.peer_events import Sent
from ipc.wire.completion import num_bytes
from ipc.wire.messages import CREDITS, Done, Error, ServerMessage, Token

FREE_END_BYTES = 1 << 20
"""At a stream's end, up to so many waiting bytes are sent without credit."""
MAX_APART = 64
"""Waiting samples that are not joined yet: a token by itself takes nine times its bytes."""


class Backlog:
    """The approximate bytes that wait for one client, of all its streams."""

    def __init__(self) -> None:
        self.num_bytes = 0


class SampleStream:
    """Samples on their way to one request's client.

    Each that is sent costs a credit, and without credit samples are joined instead of sent. The
    end costs none, and takes with it what waits, unless that is long. ``stuck_since`` is the time
    of the last progress while something waits, else infinity.
    """

    def __init__(self, reply: Reply, backlog: Backlog) -> None:
        self.reply = reply
        self.stuck_since = math.inf
        self.ended = False
        """Whether its last message is away."""
        self.num_sent = 0
        """Messages that are away."""
        self.num_bytes = 0
        """The approximate bytes that wait."""
        self._backlog = backlog
        self._credit = CREDITS
        self._waiting: list[ReturnSample] = []
        self._num_apart = 0
        """The last so many that wait have not been joined."""

    @property
    def is_sendable(self) -> bool:
        """Whether something waits that may be sent: there is credit, or it needs none."""
        return bool(self._waiting) and (self._credit > 0 or self._is_free)

    def grant(self, count: int, now: float) -> None:
        """The client has read this many messages."""
        self._credit = min(CREDITS, self._credit + count)
        if self._waiting:
            self.stuck_since = now

    def put(self, sample: ReturnSample, now: float) -> None:
        """Have this wait, after what waits; ``flush`` sends it."""
        self._waiting.append(sample)
        self._weigh(num_bytes(sample))
        self._num_apart += 1
        if self._num_apart == MAX_APART:
            self._waiting[-MAX_APART:] = joined(self._waiting[-MAX_APART:])
            self._num_apart = 0
        self.stuck_since = min(self.stuck_since, now)

    def flush(self, send: Callable[[ServerMessage], Sent], now: float) -> Sent:
        """Send what waits, as far as may be."""
        if not self.is_sendable:
            return Sent.AWAY
        ends, is_free = self._waiting[-1].is_last, self._is_free
        samples, sent = _sendable(self._waiting), Sent.AWAY
        while samples and (is_free or self._credit > 0):
            sent = send(_message(self.reply.request_id, samples[0]))
            if sent is not Sent.AWAY:
                break
            self._weigh(-num_bytes(samples.pop(0)))
            self._credit -= 1
            self.num_sent += 1
            self.stuck_since = now
        self._waiting, self._num_apart, self.ended = samples, 0, ends and not samples
        self.stuck_since = min(self.stuck_since, now) if samples else math.inf
        return sent

    def drop(self) -> None:
        """Nothing that waits will be sent."""
        self._waiting = []
        self._weigh(-self.num_bytes)

    @property
    def _is_free(self) -> bool:
        """Whether what waits needs no credit."""
        return self._waiting[-1].is_last and self.num_bytes <= FREE_END_BYTES

    def _weigh(self, change: int) -> None:
        self.num_bytes += change
        self._backlog.num_bytes += change


def _sendable(waiting: list[ReturnSample]) -> list[ReturnSample]:
    """The samples to send: an error comes after its text, and empty samples are left out."""
    samples = []
    for sample in joined(waiting):
        if sample.error is not None:
            samples.append(msgspec.structs.replace(sample, error=None))
            samples.append(ReturnSample(request_id=sample.request_id, error=sample.error))
        else:
            samples.append(sample)
    return [s for s in samples if s.is_last or s.text or s.token_ids or s.prompt_logprobs or s.finish_reason]


def _message(request_id: str, sample: ReturnSample) -> ServerMessage:
    if sample.error is not None:
        return Error(request_id, sample.error.code, sample.error.message)
    new, reason = (request_id, sample.text, sample.token_ids), sample.finish_reason
    if reason is not None and sample.usage is not None:
        logprobs = sample.logprobs, sample.prompt_logprobs
        return Done(*new, reason, sample.usage, sample.index, *logprobs, sample.stop_reason, sample.weight_versions)
    logprobs = sample.logprobs, sample.prompt_logprobs
    return Token(*new, sample.index, reason, *logprobs, sample.stop_reason, sample.weight_versions)
