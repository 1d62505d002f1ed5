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
from ipc.errors import AddressError, ConnectFailed, ConnectionLost, OdriverError, RequestFailed
from ipc.messages import Done, Error, Generate, Profile, Status, StatusReply, Token, Usage, Welcome, encode

__all__ = [
    "AddressError",
    "Client",
    "Completion",
    "ConnectFailed",
    "ConnectionLost",
    "OdriverError",
    "Piece",
    "RequestFailed",
    "Stream",
    "Usage",
]

Message = dict[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "What is 3 + 4?"}``."""


class Piece(msgspec.Struct, frozen=True):
    """What is new of a completion. The last piece, and no other, has the reason why it ended and what it cost."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    usage: Usage | None = None


class Completion(msgspec.Struct, frozen=True):
    """A whole completion."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage


class Client:
    """A connection to a daemon; any number of threads may use one, with many requests at once.

    ``address`` None is where ``odriver serve`` listens by default. ``timeout`` is how many seconds a daemon has to
    answer when it is connected to; one that is just starting is waited for as long. Raises AddressError, and
    ConnectFailed if none answers. A request that a daemon has accepted may take its time: it ends with an answer, or
    with ConnectionLost when the daemon goes away or hangs. The next request after that connects anew.
    """

    def __init__(self, address: str | None = None, timeout: float = 10.0) -> None:
        self._connection = Connection(checked_address(address), timeout)
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
        request_id = self._connection.new_request_id()
        answer = self._connection.call(request_id, encode(Status(request_id))).get()
        if isinstance(answer, Error):
            raise RequestFailed(answer.code, answer.message)
        assert isinstance(answer, StatusReply)
        return answer.status

    def start_profile(self, directory: str) -> str:
        """Have the daemon trace what its device and host do, for a directory that it can write; the directory."""
        return self._profile(directory)

    def stop_profile(self) -> str:
        """Have the daemon write the trace it began; the directory it is in. It computes nothing meanwhile."""
        return self._profile(None)

    def close(self) -> None:
        """End the connection; what is open is aborted, and whoever waits for it gets ConnectionLost."""
        self._finalizer()

    def _profile(self, directory: str | None) -> str:
        request_id = self._connection.new_request_id()
        answer = self._connection.call(request_id, encode(Profile(request_id, directory))).get()
        if isinstance(answer, Error):
            raise RequestFailed(answer.code, answer.message)
        assert isinstance(answer, Done)
        return answer.text

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
            return Piece(answer.text, answer.token_ids)
        self._ended = True
        if isinstance(answer, Error):
            raise RequestFailed(answer.code, answer.message)
        if isinstance(answer, Done):
            return Piece(answer.text, answer.token_ids, answer.finish_reason, answer.usage)
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


def _whole(pieces: list[Piece]) -> Completion:
    last = pieces[-1]
    assert last.finish_reason is not None and last.usage is not None
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return Completion("".join([piece.text for piece in pieces]), token_ids, last.finish_reason, last.usage)
