"""Tokenize, detokenize and tokenizer_info, from the client through a real driver and back; and metrics over the wire."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fake_driver import FakeDriver, serving
from fakes import EOS, FakeEngine, FakeTokenizer
from gateways import CHAT, TEXT, gateway

from driver.odriver import oDriver
from ipc.async_client import AsyncClient
from ipc.client import Client
from ipc.errors import RequestFailed

HELLO = list(b"hello")
TURNS = [{"role": "user", "content": "hello"}]
LONG = "0123456789" * 40
"""More than FakeEngine's context."""


@pytest.fixture
def parrot(address: str) -> Iterator[oDriver]:
    """A real driver that is being served."""
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    with serving(address, driver):
        yield driver
    driver.stop("enough")


@pytest.mark.usefixtures("parrot")
def test_texts_and_conversations_have_token_ids(address: str) -> None:
    """And those a text again, special tokens as they are spelt."""
    with Client(address) as client:
        assert client.tokenize("hello") == HELLO == client.tokenize("hello", add_special_tokens=False)
        assert client.tokenize(messages=TURNS) == list(b"user: hello\nassistant: ")
        assert client.tokenize("") == []
        assert client.detokenize([*HELLO, EOS]) == "hello<end>"
        assert client.tokenizer_info()["tokenizer_class"] == "FakeTokenizer"


@pytest.mark.usefixtures("parrot")
def test_the_async_client_has_them_too(address: str) -> None:
    """With the same words."""

    async def use() -> list[Any]:
        async with AsyncClient(address) as client:
            both = [await client.tokenize("hello"), await client.detokenize(HELLO)]
            return [*both, (await client.tokenizer_info())["eos_token"], await client.metrics()]

    assert asyncio.run(use()) == [HELLO, "hello", "<end>", ""]


@pytest.mark.usefixtures("parrot")
def test_what_has_no_token_ids_is_refused_by_name(address: str) -> None:
    """And changes nothing for the next."""
    with Client(address) as client:
        for ask, words in (
            (lambda: client.tokenize("x", messages=TURNS), "exactly one of them"),
            (lambda: client.tokenize("x", chat_template_kwargs={"a": 1}), "send messages"),
            (lambda: client.tokenize(messages=[{"role": "user"}]), "must have role and content"),
            (lambda: client.detokenize([1, 257]), r"token_ids\[1\] must be a token id from 0 to 256"),
        ):
            with pytest.raises(RequestFailed, match=words) as refusal:
                ask()
            assert refusal.value.code == "invalid_request"
        assert client.tokenize("hello") == HELLO


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize("kept", [5, -1])
@pytest.mark.parametrize(
    ("path", "body", "whole"),
    [
        (TEXT, {"prompt": LONG}, LONG),
        (TEXT, {"prompt": LONG, "add_special_tokens": False}, LONG),
        (TEXT, {"prompt": list(LONG.encode())}, LONG),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, f"user: {LONG}\nassistant: "),
    ],
)
def test_what_is_used_of_a_prompt_beyond_the_context_is_told(
    address: str, path: str, body: dict[str, Any], whole: str, kept: int
) -> None:
    """The end of it, for whoever wants the ids; a length that cannot be is refused in its own words."""
    asked = {"return_token_ids": True, "max_tokens": 2, "truncate_prompt_tokens": kept, **body}
    with gateway(address) as http:
        answer = http.post(path, json=asked).json()
        refused = http.post(path, json=asked | {"truncate_prompt_tokens": 0}).json()["error"]
        room = http.get("/v1/models").json()["data"][0]["max_model_len"] - 2

    found = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert bytes(found) == whole.encode()[-(room if kept < 0 else kept) :]
    assert answer["usage"]["prompt_tokens"] == len(found)
    assert refused["code"] in ("invalid_request", "context_length_exceeded")


def test_metrics_come_over_the_control_socket(address: str) -> None:
    """As Prometheus would be told."""
    with serving(address, FakeDriver(), metrics=lambda: "up 1\n"), Client(address) as client:
        assert client.metrics() == "up 1\n"
