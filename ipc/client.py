"""What a program talks to the daemon with; it loads no jax.

    with Client() as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)

A request starts when ``generate`` or ``chat`` is called, not when its first piece is asked for, so many can be started
from one thread and read one after the other. Leaving its loop early, closing or dropping the stream aborts it.
"""

import weakref
from types import TracebackType
from typing import Any, Self

import msgspec

from ipc.addresses import checked_address
from ipc.connection import Call, Connection
from ipc.control_client import ControlClient
from ipc.errors import AddressError, ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.messages import Done, Error, Generate, Logprob, Token, Usage, Welcome, encode

__all__ = [
    "AddressError",
    "Choice",
    "Client",
    "Completion",
    "ConnectFailed",
    "ConnectionLost",
    "Logprob",
    "OdriverError",
    "Piece",
    "RequestFailed",
    "Stream",
    "Usage",
]

Message = dict[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "What is 3 + 4?"}``."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities by token id, for one place in a text: first the token that is there, then the likeliest."""


class Piece(msgspec.Struct, frozen=True):
    """What is new of a completion. The last piece of a sample has the reason why it ended.

    The last piece of all, and no other, has what the request cost. ``index`` is the sample's, of ``n``. ``logprobs`` has
    an entry for each token, ``prompt_logprobs`` one for each prompt token, None for the first; both only as asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    usage: Usage | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []


class Choice(msgspec.Struct, frozen=True):
    """One whole sample."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]


class Completion(msgspec.Struct, frozen=True):
    """A whole completion: its ``n`` samples, what it cost, and the prompt's log-probabilities.

    ``text``, ``token_ids``, ``finish_reason`` and ``logprobs`` are those of the first sample.
    """

    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None]

    @property
    def text(self) -> str:
        """The first sample's."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The first sample's."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The first sample's."""
        return self.choices[0].logprobs


class Client:
    """A connection to a daemon; any number of threads may use one, with many requests at once.

    ``address`` None is where ``odriver serve`` listens by default. ``timeout`` is how many seconds a daemon has to
    answer when it is connected to; one that is just starting is waited for as long. Raises AddressError, and
    ConnectFailed if none answers. A request that a daemon has accepted may take its time: it ends with an answer, or
    with ConnectionLost when the daemon goes away or hangs. The next request after that connects anew.
    """

    def __init__(self, address: str | None = None, timeout: float = 10.0) -> None:
        self._address = checked_address(address)
        self._timeout = timeout
        self._connection = Connection(self._address, timeout)
        self._finalizer = weakref.finalize(self, self._connection.close)
        try:
            self._connection.call(self._connection.new_request_id(), b"").get()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome:
        """What the daemon says of itself: ``model``, ``max_model_len`` and more."""
        welcome = self._connection.welcome
        assert welcome is not None, "a Client is made by being connected"
        return welcome

    def generate(self, prompt: str | list[int], **params: Any) -> "Stream":
        """Continue a text, or token ids; ``params`` are those of ``SamplingParams``. Iterate over the answer's pieces."""
        request_id = self._connection.new_request_id()
        return self._stream(Generate(request_id, prompt=prompt, params=params))

    def chat(self, messages: list[Message], **params: Any) -> "Stream":
        """Continue a conversation, through the model's chat template. Iterate over the answer's pieces."""
        request_id = self._connection.new_request_id()
        return self._stream(Generate(request_id, messages=messages, params=params))

    def complete(self, prompt: str | list[int], **params: Any) -> Completion:
        """As ``generate``, and wait for the whole, which comes at once."""
        request_id = self._connection.new_request_id()
        with self._stream(Generate(request_id, prompt=prompt, params=params, stream=False)) as stream:
            return _whole(list(stream))

    def status(self) -> dict[str, Any]:
        """The daemon's numbers: what runs and waits, pages, steps, tokens and more."""
        if not self._finalizer.alive:
            raise ConnectionLost("this client is closed")
        with ControlClient(self._address, self._timeout) as control:
            return control.status()

    def close(self) -> None:
        """End the connection; what is open is aborted, and whoever waits for it gets ConnectionLost."""
        self._finalizer()

    def _stream(self, request: Generate) -> "Stream":
        frame = encode(request)
        limit = self.welcome.max_message_bytes
        if len(frame) > limit:
            raise RequestFailed("message_too_long", f"a message may have {limit} bytes, not {len(frame)}")
        return Stream(self, self._connection, self._connection.call(request.request_id, frame))


class Stream:
    """The pieces of one completion as they come, for one thread to iterate over once."""

    def __init__(self, client: Client, connection: Connection, call: Call) -> None:
        self._client = client  # a client that nobody else holds lives as long as this
        self._connection = connection
        self._call = call
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """The next piece. Raises RequestFailed if the daemon could not do it, ConnectionLost if it went away."""
        if self._ended:
            raise StopIteration
        try:
            answer = self._call.get()
        except OdriverError:
            self._ended = True
            raise
        if isinstance(answer, Token):
            return _piece(answer, None)
        self._ended = True
        if isinstance(answer, Error):
            raise RequestFailed(answer.code, answer.message)
        if isinstance(answer, Done):
            return _piece(answer, answer.usage)
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it has not ended; nothing more comes."""
        if not self._ended:
            self._ended = True
            self._connection.abort(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _piece(answer: Token | Done, usage: Usage | None) -> Piece:
    return Piece(
        answer.text,
        answer.token_ids,
        answer.finish_reason,
        usage,
        answer.index,
        answer.logprobs,
        answer.prompt_logprobs,
    )


def _whole(pieces: list[Piece]) -> Completion:
    usage = pieces[-1].usage
    assert usage is not None
    samples: dict[int, list[Piece]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append(piece)
    return Completion(
        choices=[_choice(index, samples[index]) for index in sorted(samples)],
        usage=usage,
        prompt_logprobs=[token for piece in pieces for token in piece.prompt_logprobs],
    )


def _choice(index: int, pieces: list[Piece]) -> Choice:
    reason = pieces[-1].finish_reason
    assert reason is not None
    return Choice(
        index=index,
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        finish_reason=reason,
        logprobs=[token for piece in pieces for token in piece.logprobs],
    )
