"""``/openapi.json``: OPERATIONS as OpenAPI 3.1, with the JSON schemas of their structs."""

from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine import request_limits as limits
from ipc.gateway.answers import JSON
from ipc.gateway.endpoints.health import Health
from ipc.gateway.operations import OPERATIONS, Operation
from ipc.openai.answer_bodies import ErrorAnswer

EVENTS = "text/event-stream"
_TEMPLATE = "#/components/schemas/{name}"
_ALWAYS = (403, 500)
_WITH_KEY = (401, 429)
_WITH_BODY = (400, 413, 415)
"""Statuses that any operation may have, one for callers, or one with a body."""
_RANGES: dict[str, dict[str, Any]] = {
    "n": {"minimum": 1, "maximum": limits.MAX_N},
    "best_of": {"minimum": 1, "maximum": limits.MAX_N},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 10},
    "num_speculative_tokens": {"minimum": 0, "maximum": limits.MAX_SPECULATIVE_TOKENS},
    "priority": {"minimum": -limits.MAX_PRIORITY, "maximum": limits.MAX_PRIORITY},
    "timeout_s": {"exclusiveMinimum": 0, "maximum": limits.MAX_TIMEOUT},
    "queue_timeout_s": {"exclusiveMinimum": 0, "maximum": limits.MAX_TIMEOUT},
    "cache_salt": {"maxLength": limits.MAX_SALT},
    "logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
}
"""The ranges that SamplingParams checks, by the kinds of value."""
_ANCHORS = {r"\A": "^", r"\Z": "$"}
"""Of a pattern's ends in Python, and in JSON schemas, where Python's are letters."""


async def show(request: Request) -> Response:
    """The document."""
    del request
    return Response(_encoded(), media_type=JSON)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The OpenAPI document, in Python's own types."""
    kinds = {kind for one in OPERATIONS for kind in (one.body, one.chunk, one.answer) if isinstance(kind, type)}
    _, schemas = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template=_TEMPLATE)
    for schema in schemas.values():
        for name, described in schema.get("properties", {}).items():
            _restrict(described, _RANGES.get(name, {}))
    return {
        "openapi": "3.1.0",
        "info": {"title": "oDriver's gateway", "version": "1", "license": {"name": "Apache-2.0"}},
        "paths": _paths(),
        "components": {"schemas": schemas, "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}}},
    }


def _paths() -> dict[str, Any]:
    return {one.path.replace(":path", ""): {one.method.lower(): _operation(one)} for one in OPERATIONS}


def _operation(one: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {
        "summary": one.what,
        "operationId": one.run.__module__.rpartition(".")[2] + "_" + one.run.__name__,
    }
    parameters: list[dict[str, Any]] = [{"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}}]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in one.query]
    if "{model" in one.path:
        parameters.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string"}})
    told["parameters"] = parameters
    if one.body is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(one.body)}}}
    if not one.public:
        told["security"] = [{"api_key": []}] if one.for_operators else [{"api_key": []}, {}]
    statuses = {*one.errors, *_ALWAYS}.union(() if one.public else _WITH_KEY, () if one.body is None else _WITH_BODY)
    told["responses"] = {str(status): _error(one, status) for status in sorted(statuses)}
    if one.answer:
        told["responses"] = {"200": _answer(one)} | told["responses"]
    return told


def _answer(one: Operation) -> dict[str, Any]:
    if isinstance(one.answer, str):
        return {"description": one.what, "content": {one.answer.partition(";")[0]: {"schema": {"type": "string"}}}}
    content = {JSON: {"schema": _schema(one.answer)}}
    if one.chunk is not None:
        described = f"with `stream`: events whose data is a {one.chunk.__name__}"
        content[EVENTS] = {"schema": {"description": described}}
    return {"description": one.what, "content": content}


def _error(one: Operation, status: int) -> dict[str, Any]:
    kind = Health if one.answer is Health and status == HTTPStatus.SERVICE_UNAVAILABLE else ErrorAnswer
    told: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": _schema(kind)}}}
    if status in (429, 503):
        told["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return told


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_TEMPLATE)
    return schema


def _restrict(described: dict[str, Any], ranges: dict[str, Any]) -> None:
    """Say the limits of numbers and strings, in whichever alternative of a field they are."""
    for one in described.get("anyOf", []):
        if one.get("type") in (("string",) if "maxLength" in ranges else ("integer", "number")):
            one.update(ranges)
    for one in (described, *described.get("anyOf", [])):
        for python, json in _ANCHORS.items() if "pattern" in one else ():
            one["pattern"] = one["pattern"].replace(python, json)
