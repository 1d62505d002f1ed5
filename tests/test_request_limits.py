"""The limits of a request's form: at each of them a request passes, one beyond it is refused in words, on every way in."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_driver import serving
from fakes import FakeEngine, FakeTokenizer
from gateways import CHAT, TEXT, chat, gateway
from raw_client import RawClient

from driver.errors import InvalidRequest
from driver.odriver import oDriver
from driver.text.json_schema import check_json
from engine import request_limits as limits
from ipc.wire.codec import MessageError, decode_client_message, decode_control_message, encode
from ipc.wire.messages import Done, Error, Generate, Token
from ipc.wire.operations import AbortRequest

DOCUMENT = (Path(__file__).parent.parent / "ipc" / "PROTOCOL.md").read_text()
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested(depth: int) -> list[Any]:
    """So many lists within one another."""
    return [nested(depth - 1)] if depth > 1 else []


def many(count: int) -> dict[str, int]:
    """So many names."""
    return {f"x{number}": number for number in range(count)}


def calling(count: int, arguments: str = "{}") -> dict[str, Any]:
    """A chat in which so many calls were made at once."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call] * count}]}


def switches(value: Any, name: str = "s") -> dict[str, Any]:
    """A chat with one switch of the template."""
    return {"messages": [USER], "chat_template_kwargs": {name: value}}


def asking(**params: Any) -> dict[str, Any]:
    """A prompt with these parameters."""
    return {"prompt": "x", **params}


JSON_63, JSON_64 = ('{"a":' + "[" * depth + "]" * depth + "}" for depth in (63, 64))
CASES = {
    "depth": (switches(nested(62)), switches(nested(63)), "maps and lists may be 64 deep"),
    "depth of arguments": (calling(1, JSON_63), calling(1, JSON_64), "maps and lists may be 64 deep"),
    "values": (switches([1] * 130_000), switches([1] * 131_072), "a message may have 131072 values in all"),
    "name of a switch": (switches(1, "s" * 128), switches(1, "s" * 129), "a name may have 128 characters, not 129"),
    "messages": ({"messages": [USER] * 4096}, {"messages": [USER] * 4097}, "length <= 4096"),
    "tool calls": (calling(512), calling(513), "messages[1]: tool_calls may be 512, not 513"),
    "n": (asking(n=64), asking(n=65), "n must be from 1 to 64, not 65"),
    "seed": (asking(seed=2**32 - 1), asking(seed=2**63), "seed"),  # of 64 bits by HTTP
    "priority": (asking(priority=2**31 - 1), asking(priority=2**31), "priority must be from -2147483647 to 2147483647"),
    "timeout_s": (asking(timeout_s=86400), asking(timeout_s=86401), "timeout_s must be above 0 and at most 86400"),
    "stop": (asking(stop=["s"] * 16), asking(stop=["s"] * 17), "stop must be at most 16 strings, not 17"),
    "a stop": (asking(stop="s" * 256), asking(stop="s" * 257), "stop must be strings of 1 to 256 characters"),
    "stop ids": (asking(stop_token_ids=[1] * 128), asking(stop_token_ids=[1] * 129), "at most 128 ids, not 129"),
    "bad words": (asking(bad_words=["s"] * 128), asking(bad_words=["s"] * 129), "at most 128 strings, not 129"),
    "a bad word": (asking(bad_words=["s" * 15]), asking(bad_words=["s" * 17]), "words of at most 16 tokens"),
    "allowed ids": (
        asking(allowed_token_ids=[1] * 2**18),
        asking(allowed_token_ids=[1] * (2**18 + 1)),
        "allowed_token_ids must be at most 262144 ids, not 262145",
    ),
    "logit_bias": (
        asking(logit_bias=dict.fromkeys(range(257), 1)),
        asking(logit_bias=dict.fromkeys(range(1025), 1)),
        "logit_bias must be at most 1024 ids, not 1025",
    ),
    "prompt_logprobs": (asking(prompt_logprobs=20), asking(prompt_logprobs=21), "prompt_logprobs must be from 0 to 20"),
    "a pattern": (
        asking(repetition_detection={"max_pattern_size": 1024, "min_count": 1000}),
        asking(repetition_detection={"max_pattern_size": 1025}),
        "max_pattern_size must be from 1 to 1024, not 1025",
    ),
    "drafts": (
        asking(num_speculative_tokens=32),
        asking(num_speculative_tokens=33),
        "num_speculative_tokens must be from 0 to 32, not 33",
    ),
    "salt": (asking(cache_salt="s" * 256), asking(cache_salt="s" * 257), "cache_salt must be at most 256 characters"),
    "context": (asking(prompt="x" * 65_535), asking(prompt="x" * 65_537), "the prompt has at least 65537 tokens"),
    "context in ids": ({"prompt": [1] * 65_535}, {"prompt": [1] * 65_537}, "the prompt has 65537 tokens"),
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the daemon of this module listens."""
    return f"ipc://{tmp_path_factory.mktemp('limits')}/o.sock"


@pytest.fixture(scope="module")
def daemon(address: str) -> Iterator[str]:
    """A parrot of 65,536 tokens."""
    driver = oDriver(FakeEngine(max_num_seqs=64, max_model_len=65_536), FakeTokenizer())
    driver.start()
    with serving(address, driver):
        yield address
    driver.stop("enough")


@pytest.fixture(scope="module")
def http(daemon: str) -> Iterator[httpx.Client]:
    """A gateway to it."""
    with gateway(daemon) as client:
        yield client


def refusal_by_zeromq(address: str, fields: dict[str, Any]) -> str:
    """What the daemon has against a request, or nothing."""
    form = {name: value for name, value in fields.items() if name in Generate.__struct_fields__}
    params = {name: value for name, value in fields.items() if name not in form} | {"max_tokens": 1}
    with RawClient(address) as client:
        client.greet()
        answer = client.ask(Generate("1", params=params, stream=False, **form))
        while isinstance(answer, Token):
            answer = client.hear()
    assert isinstance(answer, Done | Error)
    return answer.message if isinstance(answer, Error) else ""


def refusal_by_http(http: httpx.Client, fields: dict[str, Any]) -> str:
    """The same, of a body."""
    url = CHAT if "messages" in fields else TEXT
    response = http.post(url, json={**fields, "max_tokens": 1})
    assert response.status_code in (200, 400), response.text
    return "" if response.status_code == 200 else str(response.json()["error"]["message"])


@pytest.mark.parametrize("way", ["ZeroMQ", "HTTP"])
@pytest.mark.parametrize("name", CASES)
def test_at_a_limit_a_request_passes_and_beyond_it_is_refused(
    daemon: str, http: httpx.Client, name: str, way: str
) -> None:
    """With the number, whichever way it came."""
    at, beyond, words = CASES[name]

    refusals = [
        refusal_by_zeromq(daemon, fields) if way == "ZeroMQ" else refusal_by_http(http, fields)
        for fields in (at, beyond)
    ]

    assert refusals[0] == "" and words in refusals[1] and len(refusals[1]) <= limits.MAX_ERROR_LENGTH


@pytest.mark.parametrize(
    ("at", "beyond", "words"),
    [
        ({"request_id": "r" * 128}, {"request_id": "r" * 129}, "length <= 128"),
        ({"request_id": " ~"}, {"request_id": "r\n"}, "matching regex"),
        ({"request_id": "r"}, {"request_id": "\x1b[31m"}, "matching regex"),
        ({"request_id": "r"}, {"request_id": "\u202e"}, "matching regex"),
        ({"tools": [TOOL] * 512}, {"tools": [TOOL] * 513}, "length <= 512"),
        ({"resume_token_ids": [[]] * 64}, {"resume_token_ids": [[]] * 65}, "length <= 64"),
        ({"params": {"p" * 128: 1}}, {"params": {"p" * 129: 1}}, "params: a name may have 128 characters, not 129"),
        ({"params": many(256)}, {"params": many(257)}, "params: it may have 256 names, not 257"),
        ({"chat_template_kwargs": many(256)}, {"chat_template_kwargs": many(257)}, "may have 256 names, not 257"),
        ({}, many(253), "the message: it may have 256 names, not 257"),
        ({"params": {"x": nested(62)}}, {"params": {"x": nested(63)}}, "params.x: it is nested too deeply"),
        ({"tools": [{"x": nested(61)}]}, {"tools": [{"x": nested(62)}]}, "tools: it is nested too deeply"),
        ({"messages": [{"x": nested(61)}]}, {"messages": [{"x": nested(900)}]}, "messages: it is nested too deeply"),
        ({"params": {"x": [0] * 131_069}}, {"params": {"x": [0] * 131_070}}, "params.x: a message may have 131072 values"),
        ({"params": {"x": {}, "y": {}}}, {"params": {"x": [{}] * 70_000, "y": [{}] * 70_000}}, "params.y: a message may"),
    ],
)  # fmt: skip
def test_a_frame_has_its_limits(at: dict[str, Any], beyond: dict[str, Any], words: str) -> None:
    """Those of the fields that only our own protocol has."""
    decode_client_message(frame(**at))
    with pytest.raises(MessageError) as refusal:
        decode_client_message(frame(**beyond))

    assert words in str(refusal.value) and len(str(refusal.value)) <= limits.MAX_ERROR_LENGTH


def test_a_name_is_there_once() -> None:
    """What is there twice would hide the first of both from those who look."""
    once = frame(params={"x": 1, "y": 1})
    twice = [once.replace(b"\xa1y", b"\xa1x"), once.replace(b"\xa8messages", b"\xa5tools")]

    decode_client_message(once)
    for malformed in twice:
        with pytest.raises(MessageError, match=r"(params|the message): a name is given twice"):
            decode_client_message(malformed)


def frame(**fields: Any) -> bytes:
    """A request with these fields."""
    return msgspec.msgpack.encode({"type": "generate", "request_id": "a", "tools": [], "messages": [], **fields})


@pytest.mark.parametrize(
    "value",
    [
        b"\xc4\x02ab",
        b"\xc5\x00\x02ab",
        b"\xc6\x00\x00\x00\x02ab",
        b"\xc7\x02\x05ab",
        b"\xc8\x00\x02\x05ab",
        b"\xc9\x00\x00\x00\x02\x05ab",
        b"\xd4\x05a",
        b"\xd5\x05ab",
        b"\xd6\x05abcd",
        b"\xd7\x05abcdefgh",
        b"\xd8\x05abcdefghabcdefgh",
        b"\xd9\x02ab",
        b"\xda\x00\x02ab",
        b"\xdb\x00\x00\x00\x02ab",
        b"\xa2ab",
        b"\xca\x00\x00\x00\x00",
        b"\xcb" + b"\x00" * 8,
        *(bytes([lead]) + b"\x01" * size for lead, size in zip(range(0xCC, 0xD4), (1, 2, 4, 8) * 2, strict=True)),
        b"\x7f",
        b"\xe0",
        b"\xc0",
        b"\xc2",
        b"\xc3",
        b"\x81\xa1a\x01",
        b"\xde\x00\x01\xa1a\x01",
        b"\xdf\x00\x00\x00\x01\xa1a\x01",
        b"\x91\x01",
        b"\xdc\x00\x01\x01",
        b"\xdd\x00\x00\x00\x01\x01",
        b"\x90",
        b"\x80",
    ],
    ids=bytes.hex,
)
def test_every_kind_of_value_is_stepped_over(value: bytes) -> None:
    """In whatever length it is written: what follows it is found where it is, and too deep there."""
    head = b"\x83\xa4type\xa8generate\xaarequest_id\xa1a\xa6params\x81\xa1x"

    decode_client_message(head + b"\x92" + value + b"\x91" * 60 + b"\xc0")
    with pytest.raises(MessageError, match=r"params.x: it is nested too deeply"):
        decode_client_message(head + b"\x92" + value + b"\x91" * 62 + b"\xc0")


@pytest.mark.parametrize(
    ("json", "words"),
    [
        ("[" * 64 + "]" * 64, None),
        ("[" * 65 + "]" * 65, "it is nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "it is nested too deeply"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[[],[]," + "[]," * 131_069 + "[]]", "131073 maps and lists are too many: there may be 131072"),
        ("[" + "[]," * 131_070 + "[]]", None),
        ('["' + "[" * 200_000 + '"]', None),
        ('["\\"' + "[" * 100 + '"]', None),
        ('["\\\\",' + "[" * 65 + "]" * 65 + "]", "it is nested too deeply"),
        ('["\\\\\\"' + "[" * 65 + '"]', None),
        ('"' + "[" * 100, None),
        ("]" * 100 + "[]", None),
    ],
)
def test_json_is_measured_without_reading_it(json: str, words: str | None) -> None:
    """Brackets within strings are none; what is no JSON may pass, as it goes no further."""
    if words is None:
        check_json(json.encode())
    else:
        with pytest.raises(ValueError, match=words):
            check_json(json.encode())


def test_prompts_times_n_are_limited(http: httpx.Client) -> None:
    """A body may ask for 1,024 completions, whichever way it comes to that number."""
    fits = http.post(TEXT, json={"prompt": ["x"] * 16, "n": 64, "max_tokens": 1})
    beyond = http.post(TEXT, json={"prompt": ["x"] * 17, "n": 64, "max_tokens": 1})

    assert fits.status_code == 200 and len(fits.json()["choices"]) == 1024
    assert beyond.status_code == 400 and "1024 completions, not 17 prompts times n, which is 64" in beyond.text


def test_a_body_is_no_deeper_than_a_message(http: httpx.Client) -> None:
    """Wherever in it, also where nobody reads it."""
    for body in ({**chat("x"), "tools": nested(70)}, {"input": "x", "conversation": {"a": nested(70)}}):
        response = http.post(CHAT if "messages" in body else "/v1/responses", json=body)

        assert response.status_code == 400 and "maps and lists may be 64 deep" in response.text


def test_errors_are_cut(daemon: str, http: httpx.Client) -> None:
    """However long the name of what is wrong, in the middle: what is wrong is at the beginning or at the end."""
    long = "\u00e9" * 1_000_000
    said = [refusal_by_zeromq(daemon, asking(bad_words=[long])), refusal_by_http(http, asking(bad_words=[long]))]
    said += [refusal_by_http(http, asking(**{long: 1})), str(InvalidRequest("x" * 501))]

    assert all(480 < len(text) <= 500 for text in said)
    assert said[0].startswith("bad_words must be strings of 1 to 256 characters, not") and "..." in said[0]


def test_the_name_of_another_s_request_is_no_longer_than_it_can_be() -> None:
    """On the control socket."""
    decode_control_message(encode(AbortRequest("a", "x" * 1024)))
    with pytest.raises(MessageError, match="length <= 1024"):
        decode_control_message(encode(AbortRequest("a", "x" * 1025)))


def test_every_limit_is_listed_with_its_number() -> None:
    """In PROTOCOL.md, and none that there is not."""
    section = DOCUMENT.partition("## Limits of form\n")[2].partition("\n## ")[0]
    listed = {name: float(number) for name, number in re.findall(r"^\| `(\w+)` \| ([0-9.]+) \|", section, re.MULTILINE)}

    assert listed == {name: float(value) for name, value in vars(limits).items() if name.startswith("MAX_")}
