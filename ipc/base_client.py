"""The common part of ``Client`` and ``AsyncClient``: the connection, its requests and streams."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from ipc.connection.call import Call, Outcome, Put
from ipc.connection.socket_thread import Connection
from ipc.control_client import ControlClient
from ipc.errors import ConnectionLost, OdriverError
from ipc.wire.addresses import client_address
from ipc.wire.completion import Message, Piece, piece_of
from ipc.wire.keys import client_key
from ipc.wire.messages import Detokenize, Done, Token, Tokenize, Welcome

Answer = TypeVar("Answer")
Outcomes = TypeVar("Outcomes")
"""The queue that a stream's pieces come through."""
AnyStream = TypeVar("AnyStream")
"""An iterator over the pieces of one completion."""


class BaseStream(Generic[Outcomes]):
    """The pieces of one completion, to iterate over once. Dropping it aborts the request."""

    def __init__(self, client: object, connection: Connection, call: Call, outcomes: Outcomes) -> None:
        self._client = client  # a client that nobody else holds lives as long as this
        self._connection = connection
        self._call = call
        self._outcomes = outcomes
        self._ended = False

    @property
    def num_bytes(self) -> int:
        """Of the request, which is kept until the stream ends."""
        return len(self._call.frame)

    def _taken(self, outcome: Outcome) -> Piece | None:
        """The next piece, None at the end. Raises the error that has come instead."""
        self._ended = not isinstance(outcome, Token)
        if isinstance(outcome, Token | Done):
            self._connection.taken(self._call)
            return piece_of(outcome)
        if isinstance(outcome, OdriverError):
            raise outcome
        return None

    def _abort(self) -> None:
        """Abort the request if it has not ended; nothing more comes."""
        if not self._ended:
            self._ended = True
            self._connection.abort(self._call)

    def __del__(self) -> None:
        self._abort()


class BaseClient(ABC, Generic[AnyStream]):
    """A client of either kind. Its thread runs from the start, and connects on demand."""

    def __init__(
        self,
        address: str | None = None,
        timeout: float = 10.0,
        *,
        resume: bool = False,
        resume_timeout: float = 300.0,
        key: Path | str | None = None,
    ) -> None:
        self._address = client_address(address, has_key=key is not None)
        self._timeout = timeout
        self._key = key
        pair = None if key is None else client_key(Path(key))
        self._connection = Connection(self._address, timeout, resume_timeout if resume else None, pair)
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._user = ""
        self._model = ""
        self._origin: BaseClient[AnyStream] | None = None
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Called once the client is made."""

    @property
    def is_connected(self) -> bool:
        """Whether the daemon is connected, as far as is known."""
        return self._connection.is_up

    def on_behalf_of(self, user: str) -> Self:
        """A client over the same connection, which lives as long as this one, that asks for one of
        many users.

        The daemon has them take turns, and together they have the share of one client.
        """
        other = self._copy()
        other._user = user
        return other

    def of_model(self, model: str) -> Self:
        """A client over the same connection whose requests name this adapter, unless they name
        another; "" is the model itself."""
        other = self._copy()
        other._model = model
        return other

    def _copy(self) -> Self:
        other = copy.copy(self)
        other._origin = self  # whose end would close the connection
        return other

    @property
    def model(self) -> str:
        """The adapter that its requests name, or the model. Raises ConnectFailed before it is
        known."""
        return self._model or self.welcome.model

    @property
    def welcome(self) -> Welcome:
        """The daemon's welcome: ``model``, ``max_model_len`` and more; raises ConnectFailed
        before."""
        return self._connection.welcome

    def generate(
        self,
        prompt: str | list[int],
        *,
        model: str | None = None,
        stream: bool = True,
        traceparent: str = "",
        **params: Any,
    ) -> AnyStream:
        """Continue a text, or token ids; ``params`` are those of ``SamplingParams``. Iterate over
        the answer's pieces.

        ``model`` names an adapter, "" the model itself (default: see ``of_model``). Without ``stream`` the pieces come when all
        is done, one for each sample. ``traceparent``, W3C's, makes the daemon's trace of the request
        a part of the caller's.
        """
        return self._stream(
            prompt=prompt, params=params, stream=stream, traceparent=traceparent, model=self._named(model)
        )

    def chat(
        self,
        messages: list[Message],
        *,
        model: str | None = None,
        stream: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        traceparent: str = "",
        **params: Any,
    ) -> AnyStream:
        """Continue a conversation, through the model's chat template, otherwise as ``generate``.

        ``tools`` are functions that the model may call, as OpenAI has them; a call comes as text,
        in the model's own notation. ``chat_template_kwargs`` are switches of the template, such as
        ``enable_thinking``.
        """
        return self._stream(
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            params=params,
            stream=stream,
            traceparent=traceparent,
            model=self._named(model),
        )

    @abstractmethod
    def _stream(self, **question: Any) -> AnyStream:
        """Send a completion request; the arguments are those of ``Connection.generate``."""

    def _tokenizing(
        self,
        prompt: str | None = None,
        *,
        messages: list[Message] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
    ) -> Callable[[Put], Call]:
        def message(request_id: str) -> Tokenize:
            return Tokenize(
                request_id,
                prompt,
                messages,
                tools or [],
                chat_template_kwargs or {},
                add_special_tokens,
                self._user,
                truncate_prompt_tokens,
                self._named(model),
            )

        return partial(self._connection.ask, message_of=message)

    def _detokenizing(self, token_ids: list[int], model: str | None) -> Callable[[Put], Call]:
        return partial(
            self._connection.ask,
            message_of=lambda request_id: Detokenize(request_id, token_ids, self._user, self._named(model)),
        )

    def _named(self, model: str | None) -> str:
        return self._model if model is None else model

    def _asked(self, ask: Callable[[ControlClient], Answer]) -> Answer:
        """The answer of the daemon's control socket."""
        if not self._finalizer.alive or self._connection.has_ended:
            raise ConnectionLost("this client is closed")
        with ControlClient(self._address, self._timeout, key=self._key, wait=False) as control:
            return ask(control)


def expected(outcome: Outcome, kind: type[Answer]) -> Answer:
    """The answer of this kind; raises the OdriverError that has come instead."""
    if isinstance(outcome, OdriverError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
