"""Requests each of whose fields is left out, or drawn from values that are valid, at an edge, or hostile.

The fields are those of the messages and bodies themselves, so what is added there is asked for here. Whatever is asked,
each request has an end: tokens, or words about what is wrong with it.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec
import zmq
from msgspec import inspect

from engine.sampling_params import SamplingParams
from ipc.gateway.endpoints.tokens import DetokenizeRequest, TokenizeRequest
from ipc.gateway.responses_api.response_requests import ResponseRequest
from ipc.openai.request_bodies import ChatCompletionRequest, CompletionRequest
from ipc.wire import codec, messages
from ipc.wire.messages import PROTOCOL_VERSION

AT_ONCE = 64
PATIENCE = 60.0
"""Seconds in which all of a batch has to have ended, that was aborted before."""
READ = 1 << 16
"""Bytes of an answer over HTTP that are read; of more the client has enough."""
LEFT_OUT, VALID, EDGE = 0.6, 0.2, 0.1
"""Shares of fields that are nothing, as they should be, and at an edge; the rest is hostile."""
QUESTIONS = (messages.Generate, messages.Generate, messages.Generate, messages.Tokenize, messages.Detokenize)
BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}  # fmt: skip
ALWAYS: dict[str, tuple[Any, ...]] = {
    "prompt": ("Once upon a time", [1, 2, 3], "x"),
    "messages": ([USER], [USER, CALL, {"role": "tool", "content": "1", "tool_call_id": "a"}]),
    "input": ("Once", [USER]),
    "max_tokens": (1, 2, 8),
    "max_completion_tokens": (1, 8),
    "max_output_tokens": (16, 17),
    "token_ids": ([], [1, 2, 3]),
    "tokens": ([], [1, 2, 3]),
    "n": (1, 1, 2),
    "stop": ("x", ["a", "b"]),
    "tools": ([], [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    "model": (None, "null"),
}
"""Valid values of fields that a type tells too little of."""
EDGES: tuple[Any, ...] = (
    0, 1, -1, 2, 16, 20, 21, 63, 64, 65, 128, 256, 1024, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0.0, -0.0,
    1.0, 1e-300, 1e300, "", " ", "\0", "x" * 128, "x" * 129, "x" * 256, "x" * 257, [], {}, None, True, False,
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    float("nan"), float("inf"), -float("inf"), 2**64 - 1, "\x1b[31m\n\u2028\u202e", "\U0001f600" * 1000, "\ufffe", "a" * 50_000,
    b"\xff\xfe", [None] * 100, ["x"] * 2000, list(range(5000)), {"": {}}, {str(n): n for n in range(1000)}, {"a": {"a": {"a": []}}},
    msgspec.Raw(b"\x91" * 500 + b"\xc0"), msgspec.Raw(b"\x81\xa1a" * 990 + b"\xc0"), msgspec.Raw(b"\xc7\x00\x05"),
    {"regex": "(a?){99}a{99}"}, {"json": {"$ref": "#"}}, {"grammar": "start:"}, {"type": "json_object"}, "../../etc/passwd",
)  # fmt: skip
"""Some of it only msgpack can say, and JSON says another thing instead."""


def fields(rng: random.Random, kind: type, **fixed: Any) -> dict[str, Any]:
    """A map with some of the fields of a struct."""
    found: dict[str, Any] = {}
    for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]  # of a StructType
        draw = rng.random()
        needed = field.required or (field.name in ("prompt", "messages", "input", "max_tokens") and draw < 0.9)
        if draw > LEFT_OUT or needed:
            found[field.encode_name] = value(rng, field.name, field.type)
    return found | fixed


def value(rng: random.Random, name: str, kind: Any) -> Any:
    """Of a field."""
    draw = rng.random() * (1 - LEFT_OUT)
    if draw < VALID:
        return rng.choice(ALWAYS[name]) if name in ALWAYS else valid(rng, kind)
    return rng.choice(EDGES if draw < VALID + EDGE else HOSTILE)


def valid(rng: random.Random, kind: Any) -> Any:
    """Something of that type."""
    match kind:
        case inspect.UnionType(types=types):
            return valid(rng, rng.choice(types))
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.StructType(cls=cls):
            return fields(rng, cls)
        case inspect.ListType(item_type=item):
            return [valid(rng, item) for _ in range(rng.randrange(3))]
        case inspect.DictType(key_type=key, value_type=of):
            return {valid(rng, key): valid(rng, of) for _ in range(rng.randrange(3))}
        case inspect.IntType():
            return rng.randrange(9)
        case inspect.FloatType():
            return rng.random()
        case inspect.BoolType():
            return bool(rng.randrange(2))
        case inspect.StrType():
            return rng.choice(("a", " the", "[a-z]+", "0", "user"))
    return None


def question(rng: random.Random, request_id: str) -> bytes:
    """A message on the work socket, which bears this id at least."""
    kind = rng.choice(QUESTIONS)
    asked = fields(rng, kind, request_id=request_id, type=kind.__struct_config__.tag)
    if kind is messages.Generate and rng.random() < 0.95:
        asked["params"] = fields(rng, SamplingParams)
    try:
        return msgspec.msgpack.encode(asked)
    except (OverflowError, TypeError):
        return msgspec.msgpack.encode({"type": asked["type"], "request_id": request_id})


def body(rng: random.Random) -> tuple[str, bytes]:
    """An address of the gateway, and what is posted there."""
    path = rng.choice(list(BODIES))
    asked = fields(rng, BODIES[path])
    return path, json.dumps(asked, default=lambda other: str(bytes(other))).encode()


def ask_by_zeromq(address: str, count: int, seed: int) -> int:
    """So many requests, batch by batch; how many had no end though they were aborted."""
    rng, unanswered = random.Random(seed), 0
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    dealer.send(codec.encode(messages.Hello(PROTOCOL_VERSION)))
    for start in range(0, count, AT_ONCE):
        left = {str(number) for number in range(start, min(start + AT_ONCE, count))}
        for request_id in left:
            dealer.send(question(rng, request_id))
        for request_id in left:
            dealer.send(codec.encode(messages.Abort(request_id)))
        until, unnamed = time.monotonic() + PATIENCE, 0  # errors about a message whose id could not be read
        while len(left) > unnamed and dealer.poll(max(0, int(1000 * (until - time.monotonic())))):
            heard = msgspec.msgpack.decode(dealer.recv(), strict=False)
            if heard["type"] == "ping":
                dealer.send(codec.encode(messages.Pong()))
            elif heard["type"] == "error" and heard["request_id"] is None:
                unnamed += 1
            elif heard["type"] in ("done", "error"):
                left.discard(heard["request_id"])
        unanswered += max(0, len(left) - unnamed)
    context.destroy(linger=0)
    return unanswered


def ask_by_http(url: str, count: int, seed: int) -> int:
    """So many requests, AT_ONCE at a time; how many had no answer."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(lambda number: not _answered(url, *body(random.Random(seed + number))), range(count)))


def _answered(url: str, path: str, data: bytes) -> bool:
    connection = HTTPConnection(url, timeout=PATIENCE)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(READ)
        return 200 <= answer.status < 600
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
