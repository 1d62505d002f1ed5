"""Requests to the driver and its returns: plain data, and the channel that carries it."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import msgspec

from driver.errors import DriverError
from driver.stages.fair_share import Holder

RequestOrder = Literal["age", "tokens", "rate", "client"]
"""How open requests are listed: oldest, most tokens generated, or fastest first; or by client, and
then the oldest first."""
UpdateMode = Literal["keep", "wait", "abort"]
"""What becomes of the requests that are open: they go on with the new weights, the update waits
for their end, or they are ended. Those that come meanwhile wait."""
BYTES_PER_TOKEN = 4
"""An estimate for text that is not tokenised yet; a limit of load need not be exact."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of a request in seconds, by the names of their histograms.

    ``time_to_first_token_s`` is ``queue_time_s`` and ``prefill_time_s`` together.
    ``decode_time_s`` ends with the last token, of the longest sample where there are several, and
    ``tokens_per_second`` are all tokens after the first by that time; 0 if there are none.
    """

    queue_time_s: float
    prefill_time_s: float
    time_to_first_token_s: float
    decode_time_s: float
    tokens_per_second: float


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of the prompt and tokens generated, with the one that ended the output.

    ``cached_tokens`` are those of the prompt that were found in the prefix cache. A request that
    ended without a token has no ``timings``, and so has one about tokens alone.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Timings | None = None


class RequestError(msgspec.Struct, frozen=True):
    """Why a request failed: a code of driver/errors.py, and a sentence for a person."""

    code: str
    message: str


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token's log-probability (natural), its rank from 1, and its text if asked for.

    ``token_bytes`` are the bytes of a token that is only a part of a character, which its text
    shows as U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


class ReturnSample(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one request.

    ``text`` may lag behind ``token_ids``: half a character and a possible start of a stop string
    are held back. ``index`` says which of the request's ``n`` outputs it belongs to; the last of
    each has a ``finish_reason`` (stop, length, repetition, timeout, abort). Exactly one sample of
    a request is its last: it has a ``finish_reason`` and ``usage``, or an ``error``, never both.
    ``stop_reason`` is the stop string or the id of ``stop_token_ids`` that ended the output.
    The last of each output has ``weight_versions``: each version of the weights that made tokens
    of it, and the index of the first of them, from 0. It is empty where those of the start, which
    are version 1, have made them all. One that goes on has the version that begins with it, if
    that is another. Of an output that is resumed they begin with the first new token, be it of
    version 1 or not.
    As in vLLM, ``logprobs`` has for each token a dictionary of Logprobs by token id, its own first
    and then the likeliest; so has ``prompt_logprobs``, with None for the first token.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, int]] = []
    usage: Usage | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the request's last sample."""
        return self.usage is not None or self.error is not None


def error_sample(request_id: str, error: DriverError) -> ReturnSample:
    """The last sample of a request that failed."""
    return ReturnSample(request_id=request_id, error=RequestError(error.code, str(error)))


def done_sample(request_id: str, text: str, weight_version: int | None = None) -> ReturnSample:
    """The answer to a command that has been done, in words."""
    versions = [] if weight_version is None else [(weight_version, 0)]
    return ReturnSample(
        request_id=request_id, text=text, finish_reason="stop", usage=Usage(0, 0), weight_versions=versions
    )


class ReturnChannel(Protocol):
    """Takes the samples of a request on the driver's threads: must not block or raise."""

    def put(self, sample: ReturnSample) -> None:
        """Takes one sample; those of one request come in order, one at a time."""


class Notifying:
    """A channel that calls ``notify`` before it puts."""

    def __init__(self, channel: ReturnChannel, notify: Callable[[], None]) -> None:
        self._channel = channel
        self._notify = notify

    def put(self, sample: ReturnSample) -> None:
        """See ReturnChannel."""
        self._notify()
        self._channel.put(sample)


class QueueChannel:
    """A channel to iterate over in this process, up to the last sample of its request."""

    def __init__(self) -> None:
        self._samples: SimpleQueue[ReturnSample] = SimpleQueue()

    def put(self, sample: ReturnSample) -> None:
        """Queues the sample for the iteration."""
        self._samples.put(sample)

    def __iter__(self) -> Iterator[ReturnSample]:
        while True:
            sample = self._samples.get()
            yield sample
            if sample.is_last:
                return


@dataclass(frozen=True, eq=False, kw_only=True)
class ActiveRequest:
    """One request of a client, by a ``prompt`` (text or token ids) or by ``messages``.

    ``request_id`` is free again when the request is aborted, or its last sample is delivered. ``params`` are fields of
    SamplingParams by name, unchecked. The scheduler is fair between clients, and within the share
    of a ``client`` between its users; ``user`` is the client's name for one of them. Requests
    share the pages of a common prefix within one ``tenant`` only. ``messages``, ``tools`` and
    ``chat_template_kwargs`` are for the model's chat template; driver/text/conversation.py says
    what they may be. ``resume_token_ids``, if any, has for each of the ``n`` samples the output
    that the client has already. Generation continues behind it as if it had never been
    interrupted, and only new output goes into the channel. ``num_bytes`` is the size of the
    request's message, by which the length of a conversation is estimated before it is tokenised.
    ``traceparent`` is W3C's, for the request's trace; empty for none. ``model`` names an adapter,
    or the model itself, as "" does; ``adapters`` are those that the client may use, None for all.
    """

    request_id: str
    channel: ReturnChannel
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    user: str = ""
    tenant: str = ""
    resume_token_ids: list[list[int]] = field(default_factory=list)
    traceparent: str = ""
    num_bytes: int = 0
    model: str = ""
    adapters: Collection[str] | None = None

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens the prompt has, and the output that it resumes."""
        resumed = sum(map(len, self.resume_token_ids))
        if isinstance(self.prompt, list):
            return resumed + len(self.prompt)
        size = len(self.prompt) if isinstance(self.prompt, str) else self.num_bytes
        return resumed + size // BYTES_PER_TOKEN + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizerRequest:
    """A request for the token ids of a text or a conversation, or for the text of ids.

    The channel gets one sample: token ids or a text, with the number of tokens as
    ``usage.prompt_tokens``; or an error. With ``add_special_tokens`` a text is tokenised as a
    prompt is, with special tokens around it. ``truncate_prompt_tokens`` is how many of the last
    ids are wanted. ``model`` and ``adapters`` are as in ActiveRequest; an adapter's tokenizer is
    the model's.
    """

    request_id: str
    channel: ReturnChannel
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    token_ids: list[int] | None = None
    client: str = ""
    user: str = ""
    num_bytes: int = 0
    model: str = ""
    adapters: Collection[str] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """About how many tokens it has."""
        return self.num_bytes // BYTES_PER_TOKEN

    @property
    def holder(self) -> Holder:
        """Its client, and that client's user."""
        return self.client, self.user

    @property
    def source(self) -> tuple[str, str]:
        """Its client, and its id."""
        return self.client, self.request_id
