"""Requests of an unreasonable form: nested, huge, many-headed, odd. Each is to be answered, if only by a refusal."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from scripts.benchmarks.hostile.peer import Peer, chat, generate, post
from scripts.benchmarks.hostile.registry import DAEMON, GATEWAY, KEYED, Door, GotThrough, attack

DEPTHS = (20, 64, 65, 200, 900, 930, 960, 981, 990, 1000, 5000, 100_000)
MEGABYTES = 4 * 2**20 - 300
"""Just what a message may have."""
LONGEST_ERROR = 4000
"""Bytes that an error may come to."""
USER = {"role": "user", "content": "hi"}
ODD: tuple[Any, ...] = (
    float("nan"), float("inf"), -float("inf"), 2**63, 2**64 - 1, -(2**63), 1e308, -1, 0, "", "x", b"\xff", True, None,
    [], {}, [None], {"": None}, msgspec.msgpack.Ext(5, b"x"), msgspec.msgpack.Ext(-1, b"\0\0\0\1"), "\0", "\u202e\x1b[31m",
)  # fmt: skip
PARAMETERS = (
    "n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "ignore_eos",
    "repetition_detection", "num_speculative_tokens", "priority", "timeout_s", "queue_timeout_s", "cache_salt", "logprobs", "prompt_logprobs",
    "structured_outputs", "detokenize", "no_such_parameter",
)  # fmt: skip
HUGE_TEXTS = ("a", "hello world ", " ", "1", "\U0001f600", "e\u0301")


def lists(depth: int) -> msgspec.Raw:
    """Lists in lists, for msgpack."""
    return msgspec.Raw(b"\x91" * depth + b"\xc0")


def maps(depth: int) -> msgspec.Raw:
    """Maps in maps, for msgpack."""
    return msgspec.Raw(b"\x81\xa1a" * depth + b"\xc0")


def call(arguments: Any) -> dict[str, Any]:
    """A turn in which the assistant has called a tool."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def nested(depth: int) -> Iterator[dict[str, Any]]:
    """The same depth in each place that may hold anything."""
    for kind in (lists, maps):
        deep = kind(depth)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}
        yield chat("tools", USER, tools=[{"x": deep}])
        yield chat("tool", USER, tools=[tool])
        yield chat("kwargs", USER, chat_template_kwargs={"x": deep})
        yield chat("calls", USER, call({"x": deep}), USER)
        yield chat("content", {"role": "user", "content": deep})
        yield generate("json", structured_outputs={"json": deep})
        yield generate("prompt", deep)
        yield generate("bias", logit_bias=deep)
        yield {"type": "tokenize", "request_id": "t", "messages": [USER, call({"x": deep})], "tools": [tool]}
    yield chat("text", USER, call('{"a":' + "[" * depth + "]" * depth + "}"), USER)
    yield chat("text of maps", USER, call('{"a":' * depth + "1" + "}" * depth), USER)
    yield generate("schema", structured_outputs={"json": "[" * depth + "]" * depth})


@attack("C1, C2: nesting", DAEMON, KEYED)
def nest(door: Door) -> None:
    """What is decoded may be nested more deeply than what then reads it can bear."""
    with Peer(door) as peer:
        for depth in DEPTHS:
            for message in nested(depth):
                peer.ask(message)


@attack("C1: nesting over HTTP", GATEWAY)
def nest_over_http(door: Door) -> None:
    """Arguments are JSON in a string; bodies are JSON themselves."""
    for depth in DEPTHS:
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        messages = [USER, call(text), {"role": "tool", "tool_call_id": "x", "content": "1"}]
        for path in ("/v1/chat/completions", "/tokenize"):
            post(door, path, {"messages": messages, "model": "hostile"})
        for body in (
            f'{{"prompt": {"[" * depth}{"]" * depth}}}',
            f'{{"messages": [{json.dumps(USER)}], "tools": [{{"x": {"[" * depth}{"]" * depth}}}]}}',
            f'{{"prompt": "x", "structured_outputs": {{"json": {"[" * depth}{"]" * depth}}}}}',
            f'{{"input": "x", "tools": {"[" * depth}{"]" * depth}}}',
        ):
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
                post(door, path, body.encode())


@attack("H1: prompts that never fit", DAEMON)
def never_fit(door: Door) -> None:
    """Four megabytes of whatever takes longest to tokenise, as a prompt, a conversation and to be tokenised."""
    with Peer(door) as peer:
        for text in HUGE_TEXTS:
            prompt = text * (MEGABYTES // len(text.encode()))
            peer.ask(generate("p", prompt, max_tokens=1))
            peer.ask(chat("c", {"role": "user", "content": prompt}))
            peer.ask({"type": "tokenize", "request_id": "t", "prompt": prompt})
        peer.ask(generate("ids", [1] * 10**6))
        peer.ask({"type": "detokenize", "request_id": "d", "token_ids": [1] * 10**6})


@attack("H1: prompts that never fit, over HTTP", GATEWAY)
def never_fit_over_http(door: Door) -> None:
    """The same where bodies may be twice as long."""
    for text in HUGE_TEXTS:
        prompt = text * (7 * 2**20 // len(json.dumps(text)))
        post(door, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        post(door, "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1})
        post(door, "/tokenize", {"prompt": prompt})


@attack("odd values", DAEMON, KEYED)
def odd_values(door: Door) -> None:
    """Every parameter with every value that it is not made for."""
    with Peer(door) as peer:
        for name in PARAMETERS:
            for value in ODD:
                peer.ask(generate("o", "x", **{"max_tokens": 1, name: value}))


@attack("M1: huge names", DAEMON)
def huge_names(door: Door) -> None:
    """What is wrong is quoted, and that may be megabytes."""
    name = "z" * MEGABYTES
    with Peer(door) as peer, Peer(door, control=True) as control:
        for asked, message in (
            (peer, generate("p", "x", **{name: 1})),
            (peer, generate("v", "x", structured_outputs={"regex": f"({name}"})),
            (peer, chat("r", {"role": name, "content": "x"})),
            (peer, {"type": "abort", "request_id": "a", name: 1}),
            (control, {"type": "abort_request", "request_id": "a", "target": name}),
        ):
            answer = asked.ask(message)
            if len(answer.get("message", "")) > LONGEST_ERROR:
                raise GotThrough(f"an error quotes {len(answer['message']):,} characters")


@attack("many of everything", DAEMON)
def many(door: Door) -> None:
    """Counts that no request needs."""
    with Peer(door) as peer:
        for params in (
            {"stop": ["x" * 100] * 10_000},
            {"bad_words": ["w" * 30_000] * 128},
            {"logit_bias": dict.fromkeys(range(100000), 1.0)},
            {"allowed_token_ids": list(range(300_000))},
            {"stop_token_ids": list(range(300_000)), "min_tokens": 5},
            {"n": 64, "logprobs": 20, "prompt_logprobs": 20, "max_tokens": 2},
            {"n": 10**9},
        ):
            peer.ask(generate("m", **{"max_tokens": 1, **params}))
        peer.ask(chat("turns", *[USER] * 100_000))
        peer.ask(chat("tools", USER, tools=[{"type": "function", "function": {"name": "f"}}] * 50_000))
        peer.ask({**generate("resumed"), "resume_token_ids": [[1]] * 100_000})
        peer.ask({**generate("resumed"), "resume_token_ids": [[5] * 10**6]})


@attack("halves of characters", DAEMON, GATEWAY)
def surrogates(door: Door) -> None:
    """JSON can spell what UTF-8 cannot bear."""
    for arguments in ('{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": 1e999}', '{"a": NaN}', "\ufeff{}", '"\\ud800"'):
        if door.url:
            post(door, "/v1/chat/completions", {"messages": [USER, call(arguments)], "max_tokens": 1})
        else:
            with Peer(door) as peer:
                peer.ask(chat("s", USER, call(arguments), params={"max_tokens": 1}))
