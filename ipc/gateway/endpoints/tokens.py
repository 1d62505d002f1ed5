"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.answers import json_answer
from ipc.gateway.bodies import read
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.upstream.replicas import daemon_for
from ipc.openai.chat_messages import ChatMessage
from ipc.openai.field_names import naming
from ipc.openai.question import BodyError
from ipc.openai.request_bodies import template_switches


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, with ``add_special_tokens``, or messages, with the fields after it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: Literal[False] | None = None


class Tokens(Struct, frozen=True):
    """The ids, and how many a prompt and its output may have together."""

    count: int
    max_model_len: int
    tokens: list[int]


class TokenizerConfig(Struct, frozen=True):
    """A tokenizer's properties, by the names of tokenizer_config.json."""

    tokenizer_class: str
    chat_template: Any
    model_max_length: int
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    unk_token: str | UnsetType = UNSET
    sep_token: str | UnsetType = UNSET
    cls_token: str | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class Text(Struct, frozen=True):
    """The text of the tokens, special tokens included."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    body = await read(request, TokenizeRequest)
    if body.messages is not None and body.add_special_tokens:
        raise BodyError("add_special_tokens is for a prompt: a chat template has its own", "add_special_tokens")
    return await unless_disconnected(request.receive, _tokenized(request, body))


async def _tokenized(request: Request, body: TokenizeRequest) -> Response:
    switches = template_switches(body.chat_template_kwargs, body.add_generation_prompt, body.continue_final_message)
    client = (await daemon_for(request, body.model)).client
    token_ids = await client.tokenize(
        body.prompt,
        messages=None if body.messages is None else [message.as_dict() for message in body.messages],
        tools=body.tools,
        chat_template_kwargs=switches,
        add_special_tokens=body.add_special_tokens is not False,
    )
    return json_answer(Tokens(len(token_ids), client.welcome.max_model_len, token_ids))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read(request, DetokenizeRequest)
    return await unless_disconnected(request.receive, _detokenized(request, body))


async def _detokenized(request: Request, body: DetokenizeRequest) -> Response:
    client = (await daemon_for(request, body.model)).client
    with naming({"token_ids": "tokens"}):
        return json_answer(Text(await client.detokenize(body.tokens)))


async def info(request: Request) -> Response:
    """The tokenizer's description."""
    model = request.query_params.get("model")
    client = (await daemon_for(request, model)).client
    if client.welcome.adapter_of(model):
        await client.detokenize([])  # which it refuses if there is no such adapter
    found = {**await client.tokenizer_info(), "model_max_length": client.welcome.max_model_len}
    return json_answer(msgspec.convert(found, TokenizerConfig))
