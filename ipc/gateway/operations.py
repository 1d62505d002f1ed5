"""The gateway's operations: addresses, request bodies and responses."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.endpoints import chat_completions, completions, health, metrics, models, responses, tokens
from ipc.gateway.endpoints.chat_chunks import ChatChunk
from ipc.gateway.endpoints.refused import refuse_embeddings
from ipc.gateway.operators import lora_adapters, sleeping, weights
from ipc.gateway.operators.operator_commands import MODEL, Done
from ipc.gateway.responses_api.response_requests import ResponseRequest
from ipc.openai.answer_bodies import ChatCompletion, TextCompletion
from ipc.openai.request_bodies import ChatCompletionRequest, CompletionRequest


class Operation(NamedTuple):
    """A path and its handler. With a ``body``, or if it ``acts``, the method is POST, otherwise
    GET.

    ``answer`` is the type of a JSON answer, or another media type, and ``chunk`` the type of a
    stream's events. ``errors`` are statuses beyond those of all operations. A ``public`` operation
    needs no API key, and one ``for_operators`` that of an operator.
    """

    path: str
    what: str
    run: Callable[[Request], Awaitable[Response]]
    answer: type[Struct] | str
    body: Any = None
    chunk: Any = None
    errors: tuple[int, ...] = ()
    public: bool = False
    query: tuple[str, ...] = ()
    acts: bool = False
    for_operators: bool = False

    @property
    def method(self) -> str:
        """HTTP's."""
        return "GET" if self.body is None and not self.acts else "POST"


TEXT = "text/plain"
_OF_DAEMONS = (400, 502, 503)
"""Statuses of errors that a daemon's answer may cause."""


def _command(
    path: str,
    what: str,
    run: Callable[[Request], Awaitable[Response]],
    answer: type[Struct] | str,
    *query: str,
    body: Any = None,
    errors: tuple[int, ...] = (),
) -> Operation:
    """A command of an operator, with the errors that all have as well; what is not in a body is a part of the
    address."""
    errors = (404, *errors, 413, *_OF_DAEMONS)
    return Operation(path, what, run, answer, body, None, errors, query=(*query, MODEL), acts=True, for_operators=True)


OPERATIONS = [
    Operation(
        "/v1/chat/completions",
        "Continue a conversation",
        chat_completions.create,
        ChatCompletion,
        ChatCompletionRequest,
        ChatChunk,
        (404, *_OF_DAEMONS),
    ),
    Operation(
        "/v1/completions",
        "Continue a text, or several",
        completions.create,
        TextCompletion,
        CompletionRequest,
        TextCompletion,
        (404, *_OF_DAEMONS),
    ),
    Operation(
        "/v1/responses",
        "Continue a conversation, in OpenAI's newer shape",
        responses.create,
        responses.ResponseObject,
        ResponseRequest,
        responses.ResponseEvent,
        (404, *_OF_DAEMONS),
    ),
    Operation("/v1/embeddings", "Refused: no embeddings here", refuse_embeddings, "", dict[str, Any], errors=(400,)),
    Operation("/v1/models", "What is served", models.index, models.ModelList, errors=(503,)),
    Operation("/v1/models/{model:path}", "One that is served", models.show, models.Model, errors=(404, 503)),
    Operation(
        "/tokenize",
        "The token ids of a text or a conversation",
        tokens.tokenize,
        tokens.Tokens,
        tokens.TokenizeRequest,
        errors=(404, *_OF_DAEMONS),
    ),
    Operation(
        "/detokenize",
        "The text of token ids",
        tokens.detokenize,
        tokens.Text,
        tokens.DetokenizeRequest,
        errors=(404, *_OF_DAEMONS),
    ),
    Operation(
        "/tokenizer_info",
        "What the tokenizer is",
        tokens.info,
        tokens.TokenizerConfig,
        errors=(404, *_OF_DAEMONS),
        query=("model",),
    ),
    Operation("/health", "Whether daemons make progress", health.health, health.Health, errors=(503,), public=True),
    Operation("/ready", "Whether daemons take requests", health.ready, health.Health, errors=(503,), public=True),
    Operation("/ping", "The same as /health", health.ping, health.Health, errors=(503,), public=True),
    Operation("/load", "How much the daemons have to do", health.load, health.Load, errors=_OF_DAEMONS),
    Operation("/version", "Which oDriver this is", health.show_version, health.Version, public=True),
    Operation("/is_sleeping", "Whether the daemons sleep", sleeping.is_sleeping, sleeping.Sleeping, errors=_OF_DAEMONS),
    _command("/sleep", "Free the memory of pages", sleeping.sleep, sleeping.Slept, "level", "mode"),
    _command("/wake_up", "Take it again, and serve", sleeping.wake_up, sleeping.Woken, "tags"),
    Operation("/is_paused", "Whether the daemons are paused", weights.is_paused, weights.Paused, errors=_OF_DAEMONS),
    _command("/pause", "Compute nothing until /resume", weights.pause, weights.Changed, "mode", "clear_cache"),
    _command("/resume", "Go on after /pause", weights.resume, weights.Changed),
    Operation(
        "/init_weight_transfer_engine",
        "Nothing to set up; refuses transports that are not there",
        weights.init_weight_transfer_engine,
        Done,
        weights.InitWeightTransfer,
        errors=(413,),
        for_operators=True,
    ),
    Operation(
        "/start_weight_update",
        "Gather new weights",
        weights.start_weight_update,
        Done,
        weights.StartWeightUpdate,
        errors=(404, 409, 413, *_OF_DAEMONS),
        query=(MODEL,),
        for_operators=True,
    ),
    Operation(
        "/update_weights",
        "Serve new weights, or gather them",
        weights.update_weights,
        Done,
        weights.UpdateWeightsBody,
        errors=(404, 409, 413, *_OF_DAEMONS),
        query=(MODEL,),
        for_operators=True,
    ),
    _command(
        "/finish_weight_update",
        "Serve the weights that were gathered",
        weights.finish_weight_update,
        Done,
        errors=(409,),
    ),
    _command(
        "/reset_prefix_cache",
        "Forget the pages of prompts",
        sleeping.reset_prefix_cache,
        sleeping.Emptied,
        "reset_running_requests",
        "reset_external",
    ),
    _command(
        "/v1/load_lora_adapter", "Load an adapter", lora_adapters.load, TEXT, body=lora_adapters.LoadLoRAAdapterRequest
    ),
    _command(
        "/v1/unload_lora_adapter", "Unload one", lora_adapters.unload, TEXT, body=lora_adapters.UnloadLoRAAdapterRequest
    ),
    Operation("/metrics", "The daemons' numbers", metrics.show, metrics.TEXT, errors=(502, 503)),
]
