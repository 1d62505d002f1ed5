"""What ``Client`` and ``AsyncClient`` have in common: a connection, and how it is asked. They differ in how one waits."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from ipc.connection.call import Call, Put
from ipc.connection.socket_thread import Connection
from ipc.control_client import ControlClient
from ipc.errors import ConnectionLost
from ipc.wire.addresses import client_address
from ipc.wire.completion import Message
from ipc.wire.keys import client_key
from ipc.wire.messages import Detokenize, Tokenize, Welcome

Answer = TypeVar("Answer")
AnyStream = TypeVar("AnyStream")
"""The pieces of one completion, as they are waited for."""


class BaseClient(ABC, Generic[AnyStream]):
    """A client of either kind; its thread runs from the start, and connects when it is asked something."""

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
        own = None if key is None else client_key(Path(key))
        self._connection = Connection(self._address, timeout, resume_timeout if resume else None, own)
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._user = ""

    def on_behalf_of(self, user: str) -> Self:
        """A client over the same connection, which lives as long as this one, that asks for one of many users.

        The daemon has them take turns, and together they have the share of one client.
        """
        other = copy.copy(self)
        other._user = user
        return other

    @property
    def welcome(self) -> Welcome:
        """What the daemon says of itself: ``model``, ``max_model_len`` and more; raises ConnectFailed before."""
        return self._connection.welcome

    def generate(self, prompt: str | list[int], *, stream: bool = True, **params: Any) -> AnyStream:
        """Continue a text, or token ids; ``params`` are those of ``SamplingParams``. Iterate over the answer's pieces.

        Without ``stream`` they come when all is done, a piece for each sample.
        """
        return self._stream(prompt=prompt, params=params, stream=stream)

    def chat(
        self,
        messages: list[Message],
        *,
        stream: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **params: Any,
    ) -> AnyStream:
        """Continue a conversation, through the model's chat template, otherwise as ``generate``.

        ``tools`` are functions that the model may call, as OpenAI has them; a call comes as text, in the model's own
        notation. ``chat_template_kwargs`` are switches of the template, such as ``enable_thinking``.
        """
        return self._stream(
            messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs, params=params, stream=stream
        )

    @abstractmethod
    def _stream(self, **question: Any) -> AnyStream:
        """Ask for a completion, as ``Connection.generate`` has it."""

    def _tokenizing(
        self,
        prompt: str | None,
        messages: list[Message] | None,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
        add_special_tokens: bool,
    ) -> Callable[[Put], Call]:
        def message(request_id: str) -> Tokenize:
            return Tokenize(
                request_id, prompt, messages, tools or [], chat_template_kwargs or {}, add_special_tokens, self._user
            )

        return partial(self._connection.ask, message_of=message)

    def _detokenizing(self, token_ids: list[int]) -> Callable[[Put], Call]:
        return partial(
            self._connection.ask, message_of=lambda request_id: Detokenize(request_id, token_ids, self._user)
        )

    def _asked(self, ask: Callable[[ControlClient], Answer]) -> Answer:
        """What the daemon's control socket answers."""
        if not self._finalizer.alive:
            raise ConnectionLost("this client is closed")
        with ControlClient(self._address, self._timeout, key=self._key) as control:
            return ask(control)
