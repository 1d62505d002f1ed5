"""Output of the driver's threads to the clients, until the socket thread takes it."""

from collections import deque
from dataclasses import dataclass

from driver.request import ReturnSample
from ipc.wire.bell import Bell
from ipc.wire.completion import num_bytes

MAX_HELD_BYTES = 1 << 20
"""The longest unstreamed answer that is sent as one message; a longer one is sent in parts."""
MAX_PART_BYTES = 1 << 18
"""The approximate most bytes of samples that are joined into one message."""


class Reply:
    """The return channel of one request, which ends at one client's request id.

    Without ``stream`` all samples are sent as one, with the last, unless they are long: then in
    parts.
    """

    def __init__(self, outbox: "Outbox", identity: bytes, request_id: str, *, stream: bool = True) -> None:
        self.identity = identity
        self.request_id = request_id
        self.num_tokens = 0
        """Output tokens that the driver has made; counted by the thread that puts."""
        self.uncharged: set[Reply] | None = None
        """Where it notes, once it has tokens, that they are to be charged."""
        self._outbox = outbox
        self._stream = stream
        self._held: list[ReturnSample] = []
        self._num_held_bytes = 0

    @property
    def driver_id(self) -> str:
        """The driver's name for the request: two clients may use the same ids."""
        return f"{self.identity.hex()}:{self.request_id}"

    def put(self, sample: ReturnSample) -> None:
        """Takes one sample, on any thread, without waiting."""
        if sample.token_ids:
            self.num_tokens += len(sample.token_ids)
            if (uncharged := self.uncharged) is not None:
                uncharged.add(self)
        if self._stream:
            self._outbox.put(self, sample)
            return
        self._held.append(sample)
        self._num_held_bytes += num_bytes(sample)
        if sample.is_last or self._num_held_bytes >= MAX_HELD_BYTES:
            held, self._held, self._num_held_bytes = self._held, [], 0
            for sample in joined(held):
                self._outbox.put(self, sample)


class Outbox:
    """Samples on their way out. Any thread puts, the socket thread takes all there is."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._samples: deque[tuple[Reply, ReturnSample]] = deque()

    def put(self, reply: Reply, sample: ReturnSample) -> None:
        """Queues the sample and wakes the socket thread."""
        self._samples.append((reply, sample))
        self._bell.ring()

    def take(self) -> list[tuple[Reply, ReturnSample]]:
        """The waiting samples, joined into one an output, in the order of the requests."""
        waiting: dict[Reply, list[ReturnSample]] = {}
        for _ in range(len(self._samples)):
            reply, sample = self._samples.popleft()
            waiting.setdefault(reply, []).append(sample)
        return [(reply, sample) for reply, samples in waiting.items() for sample in joined(samples)]


def joined(samples: list[ReturnSample]) -> list[ReturnSample]:
    """As few samples for each output as are of about MAX_PART_BYTES, the one with the last of them
    last. A token's text stays beside it, for who has the first of them alone."""
    if len(samples) <= 1:
        return samples
    outputs: dict[int, list[_Part]] = {}
    for sample in samples:
        parts, size = outputs.setdefault(sample.index, []), num_bytes(sample)
        if not parts or parts[-1].num_bytes + size > MAX_PART_BYTES:
            parts.append(_Part([], 0))
        parts[-1].samples.append(sample)
        parts[-1].num_bytes += size
    outputs[samples[-1].index] = outputs.pop(samples[-1].index)
    return [_one(part.samples) for parts in outputs.values() for part in parts]


@dataclass
class _Part:
    samples: list[ReturnSample]
    num_bytes: int


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
        stop_reason=last.stop_reason,
        weight_versions=last.weight_versions
        if last.finish_reason is not None
        else [pair for piece in pieces for pair in piece.weight_versions],
        usage=last.usage,
        error=last.error,
    )
