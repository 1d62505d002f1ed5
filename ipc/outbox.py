"""What the driver's threads have for the clients, until the socket thread takes it."""

from collections import deque

from driver.request import ReturnSample
from ipc.bell import Bell


class Reply:
    """The way back of one request: a driver's ReturnChannel that ends at one client's request id.

    Without ``stream`` all samples leave as one, with the last.
    """

    def __init__(self, outbox: "Outbox", identity: bytes, request_id: str, *, stream: bool = True) -> None:
        self.identity = identity
        self.request_id = request_id
        self._outbox = outbox
        self._stream = stream
        self._held: list[ReturnSample] = []

    def put(self, sample: ReturnSample) -> None:
        """Takes one sample, on any thread, without waiting."""
        if self._stream:
            self._outbox.put(self, sample)
            return
        self._held.append(sample)
        if sample.is_last:
            for sample in joined(self._held):
                self._outbox.put(self, sample)


class Outbox:
    """Samples on their way out. Any thread puts, the socket thread takes all there is."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._samples: deque[tuple[Reply, ReturnSample]] = deque()

    def put(self, reply: Reply, sample: ReturnSample) -> None:
        """Keeps the sample and wakes the socket thread."""
        self._samples.append((reply, sample))
        self._bell.ring()

    def take(self) -> list[tuple[Reply, ReturnSample]]:
        """What has gathered for each request that has any, in the order of their first: one sample for each output."""
        waiting: dict[Reply, list[ReturnSample]] = {}
        for _ in range(len(self._samples)):
            reply, sample = self._samples.popleft()
            waiting.setdefault(reply, []).append(sample)
        return [(reply, sample) for reply, samples in waiting.items() for sample in joined(samples)]


def joined(samples: list[ReturnSample]) -> list[ReturnSample]:
    """One sample for each output, the one with the last of them last."""
    if len(samples) <= 1:
        return samples
    outputs: dict[int, list[ReturnSample]] = {}
    for sample in samples:
        outputs.setdefault(sample.index, []).append(sample)
    outputs[samples[-1].index] = outputs.pop(samples[-1].index)
    return [_one(pieces) for pieces in outputs.values()]


def _one(pieces: list[ReturnSample]) -> ReturnSample:
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return ReturnSample(
        request_id=last.request_id,
        index=last.index,
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        prompt_logprobs=[logprob for piece in pieces for logprob in piece.prompt_logprobs],
        finish_reason=last.finish_reason,
        usage=last.usage,
        error=last.error,
    )
