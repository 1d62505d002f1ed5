"""The client of a daemon, for programs; it loads no jax.

    with Client() as client:
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)

A request starts when ``generate`` or ``chat`` is called, not when its first piece is asked for, so
many can be started from one thread and read one after the other. Leaving its loop early, closing
or dropping the stream aborts it. ``ipc.async_client`` has the same for asyncio.
"""

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from ipc.base_client import Answer, BaseClient, BaseStream, expected
from ipc.connection.call import Call, Outcome, Put
from ipc.control_client import ControlClient
from ipc.wire.completion import Completion, Piece, whole
from ipc.wire.messages import AdaptersReply, Done, ListAdapters, TokenizerInfo, TokenizerInfoReply, Welcome


class Client(BaseClient["Stream"]):
    """A connection to a daemon. Threads may share it, and have many requests open at once.

    ``address`` None is where ``odriver serve`` listens: by ODRIVER_BIND, the configuration file or
    default. ``timeout`` is how many seconds
    the daemon has to answer when the client connects; a daemon that is starting is waited for as
    long. Raises AddressError, and ConnectFailed if no daemon answers. An accepted request has no
    time limit: it ends with an answer, or with ConnectionLost when the daemon goes away or hangs.
    The next request connects again.

    With ``resume``, a completion that was interrupted, or sent meanwhile, waits for the daemon to
    return and continues where it stopped: no token is lost and none comes twice. A question to the
    tokenizer is asked again. A request without
    a seed gets one. ConnectionLost is raised only if nothing new has come ``resume_timeout``
    seconds after the interruption, and ResumeFailed if the daemon then serves another model.
    ``timeout_s`` keeps running. The logger ``ipc`` reports it.

    ``key`` is a file made by ``odriver keys new``, for a daemon that asks for one. Raises
    KeyFileError if it cannot be used.
    """

    def _start(self) -> None:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def connect(self) -> Welcome:
        """Connect, if not connected; returns the daemon's welcome. Raises ConnectFailed."""
        return self.welcome if self._connection.is_up else _answer(self._connection.connect, Welcome)

    def complete(self, prompt: str | list[int], **params: Any) -> Completion:
        """As ``generate``, and wait for the whole, which comes at once."""
        with self.generate(prompt, stream=False, **params) as stream:
            return whole(list(stream))

    def tokenize(self, prompt: str | None = None, **options: Any) -> list[int]:
        """The token ids that a prompt would have, or a conversation. Raises as reading a
        completion does.

        The options are ``messages``, ``tools``, ``chat_template_kwargs`` and ``model``, as in
        ``chat``, ``add_special_tokens`` and ``truncate_prompt_tokens``.
        """
        return _answer(self._tokenizing(prompt, **options), Done).token_ids

    def detokenize(self, token_ids: list[int], *, model: str | None = None) -> str:
        """The text of token ids, special ones as they are spelt."""
        return _answer(self._detokenizing(token_ids, model), Done).text

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer, by the names of Hugging Face's tokenizer_config.json."""
        return _answer(partial(self._connection.ask, message_of=TokenizerInfo), TokenizerInfoReply).info

    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that this client may use: ``name``, ``path``, ``version``, ``rank`` and
        more."""
        return _answer(partial(self._connection.ask, message_of=ListAdapters), AdaptersReply).adapters

    def status(self) -> dict[str, Any]:
        """The daemon's numbers: what runs and waits, pages, steps, tokens and more."""
        return self._asked(ControlClient.status)

    def metrics(self) -> str:
        """The daemon's metrics in Prometheus's text format."""
        return self._asked(ControlClient.metrics)

    def close(self) -> None:
        """Close the connection. Open requests are aborted, and end with ConnectionLost."""
        self._finalizer()

    def _stream(self, **question: Any) -> "Stream":
        outcomes: SimpleQueue[Outcome] = SimpleQueue()
        call = self._connection.generate(outcomes.put, user=self._user, **question)
        return Stream(self, self._connection, call, outcomes)


class Stream(BaseStream["SimpleQueue[Outcome]"]):
    """The pieces of one completion as they come, for one thread to iterate over once."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """The next piece. Raises RequestFailed if the daemon refuses, ConnectionLost if it is
        gone."""
        if self._ended:
            raise StopIteration
        self._connection.check_process()
        piece = self._taken(self._outcomes.get())
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Abort the request if it has not ended; nothing more comes."""
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._abort()


def _answer(ask: Callable[[Put], Call], kind: type[Answer]) -> Answer:
    """Send a request and return its answer; raises the OdriverError that comes instead."""
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    ask(outcomes.put)
    return expected(outcomes.get(), kind)
