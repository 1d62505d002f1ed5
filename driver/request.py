"""What goes into the driver and what comes back: plain data, and the channel that carries it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

BYTES_PER_TOKEN = 4
"""Of text, as a rule of thumb: before it is tokenised nobody knows, and a limit of load need not be exact."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and tokens generated; a token that ended the request counts as generated."""

    prompt_tokens: int
    completion_tokens: int


class RequestError(msgspec.Struct, frozen=True):
    """Why a request got no (more) tokens: a code of driver/errors.py and a sentence for a person."""

    code: str
    message: str


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token's log-probability (natural), its rank (1 is the likeliest), and its text where texts are made."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class ReturnSample(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one request.

    ``text`` may lag behind ``token_ids``: half a character and what may be the start of a stop string are held back.
    ``index`` says which of the request's ``n`` outputs it belongs to; the last of each has a ``finish_reason`` (stop,
    length, repetition, timeout, abort). Exactly one sample of a request is its last: it has a ``finish_reason`` and
    ``usage``, or it has an ``error``, never both. As in vLLM, ``logprobs`` holds for each token a dictionary of
    Logprobs by token id, its own first and then the likeliest; ``prompt_logprobs`` the same, None for the first token.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] = []
    prompt_logprobs: list[dict[int, Logprob] | None] = []
    finish_reason: str | None = None
    usage: Usage | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows for this request."""
        return self.usage is not None or self.error is not None


class ReturnChannel(Protocol):
    """Where the samples of a request go. The driver's threads call it: it must neither block nor raise."""

    def put(self, sample: ReturnSample) -> None:
        """Takes one sample; those of one request come in order, never two at once."""


class QueueChannel:
    """A channel to iterate over, in this process: ends after the last sample of its one request."""

    def __init__(self) -> None:
        self._samples: SimpleQueue[ReturnSample] = SimpleQueue()

    def put(self, sample: ReturnSample) -> None:
        """Keeps the sample for whoever iterates."""
        self._samples.put(sample)

    def __iter__(self) -> Iterator[ReturnSample]:
        while True:
            sample = self._samples.get()
            yield sample
            if sample.is_last:
                return


@dataclass(frozen=True, eq=False, kw_only=True)
class ActiveRequest:
    """One request as a client put it, with exactly one of ``prompt`` (text or token ids) and ``messages``.

    ``request_id`` is free again once the last sample has been delivered. ``params`` are the fields of SamplingParams
    by name, unchecked. ``client`` is who asks: the scheduler is fair between clients, and within a client's share between
    its users; ``user`` is the client's word for them. Pages of what prompts have in common
    are shared within one ``tenant`` only. ``messages``, ``tools`` and ``chat_template_kwargs`` are for the model's chat
    template; driver/text/conversation.py says what they may be.
    ``resume_token_ids``, if any, are for each of the ``n`` samples the output that the client has already: generation
    goes on behind it as if it had never been interrupted, and only what is new comes into the channel. ``num_bytes`` is the
    size of the message that it came in, by which a conversation is weighed before it is tokenised.
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
    num_bytes: int = 0

    @property
    def estimated_tokens(self) -> int:
        """What the prompt will have, about, and the output that it goes on with."""
        resumed = sum(map(len, self.resume_token_ids))
        if isinstance(self.prompt, list):
            return resumed + len(self.prompt)
        size = len(self.prompt) if isinstance(self.prompt, str) else self.num_bytes
        return resumed + size // BYTES_PER_TOKEN + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizerRequest:
    """Asks for the token ids of a text or of a conversation, or for the text of ``token_ids``: one of the three.

    The channel gets one sample: token ids or a text, with the number of tokens as the prompt's in its ``usage``; or an
    error. ``add_special_tokens`` is whether a text has those around it that a prompt has.
    """

    request_id: str
    channel: ReturnChannel
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    token_ids: list[int] | None = None
    client: str = ""
    user: str = ""
    num_bytes: int = 0

    @property
    def estimated_tokens(self) -> int:
        """How much work it is, about."""
        return self.num_bytes // BYTES_PER_TOKEN
