"""Programs that others wrote, in front of a gateway: the ``openai`` client, curl, and the documents' examples of both."""

import asyncio
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from fake_driver import PATIENCE, FakeDriver
from gateways import gateway
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field
from test_daemon_process import FLAGS
from xla_flags import xla_flags

from driver.errors import Overloaded
from ipc.gateway.access.callers import Callers
from scripts.processes import odriver

CHAPTER = (Path(__file__).parent.parent / "docs" / "http-api.md").read_text(encoding="utf-8")
SUM: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 3 + 4?"}]


class Animal(BaseModel):
    """What a model is made to say."""

    name: Literal["Ben", "Nina"]
    age: int = Field(ge=1, le=20)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a gateway to the model we ship is, each of them a process."""
    directory = tmp_path_factory.mktemp("daemon")
    address = f"ipc://{directory}/o.sock"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XLA_FLAGS", xla_flags())
        with (
            odriver("serve", "--bind", address, *FLAGS),
            odriver("gateway", "--connect", address, "--port", "0") as web,
        ):
            yield web.status


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def held(address: str, driver: FakeDriver) -> Iterator[str]:
    """The address of a gateway to a driver that leaves requests open."""
    del driver
    with gateway(address) as http:
        yield f"{http.base_url}/v1"


def test_an_answer_is_the_same_whole_streamed_and_by_many_tasks(client: openai.OpenAI) -> None:
    """With its usage, and the id that the answer's header has."""
    whole = client.chat.completions.create(model="demo", messages=SUM, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )

    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="demo", messages=SUM, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none") as other:
            return await asyncio.gather(*(ask(other) for _ in range(12)))

    assert whole.choices[0].message.content == "3 + 4 is 7."
    assert whole.id == f"chatcmpl-{whole._request_id}"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "3 + 4 is 7."
    assert chunks[-1].usage == whole.usage
    assert asyncio.run(ask_all()) == ["3 + 4 is 7."] * 12


def test_log_probabilities_come_as_openai_has_them(client: openai.OpenAI) -> None:
    """Of a chat, whose tokens spell its text, then its end, and of an echoed text, whose first has none."""
    chat = client.chat.completions.create(
        model="demo", messages=SUM, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    text = client.completions.create(
        model="demo", prompt="Once upon a time", temperature=0, logprobs=2, echo=True, max_tokens=3, n=2
    )

    assert chat.logprobs is not None and chat.logprobs.content is not None
    *tokens, end = chat.logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == chat.message.content
    assert end.token == "<|end|>" and all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in (*tokens, end))
    first, second = text.choices
    assert first.text == second.text and first.text.startswith("Once upon a time")
    assert first.logprobs is not None and first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[0] is None and all(first.logprobs.token_logprobs[1:])
    assert "".join(first.logprobs.tokens or []) == first.text


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    """By the client's ``parse``, which asks for a JSON schema; whole and streamed."""
    asked = "Tell me of somebody."
    whole = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": asked}], response_format=Animal, temperature=3, seed=4
    )
    with client.chat.completions.stream(
        model="demo", messages=[{"role": "user", "content": asked}], response_format=Animal, temperature=3, seed=4
    ) as stream:
        streamed = stream.get_final_completion()

    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Animal) and streamed.choices[0].message.parsed == parsed


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    """Each of its own class, with the field that is wrong."""
    with pytest.raises(openai.BadRequestError, match="top_p must be above 0") as wrong:
        client.chat.completions.create(model="demo", messages=SUM, top_p=2)
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="owl", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model="demo", prompt="x " * 1000)
    with pytest.raises(openai.BadRequestError, match="a number is too large") as large:
        client.completions.create(model="demo", prompt=[2**70])

    assert large.value.param == "prompt"
    assert wrong.value.type == "invalid_request_error" and missing.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["demo"]


def test_a_client_that_is_told_to_come_again_does(held: str, driver: FakeDriver) -> None:
    """After as many seconds as Retry-After says, by itself."""
    driver.refusal = Overloaded("too many wait", 0.1)
    asked = threading.Event()

    def relent(_: httpx.Response) -> None:
        driver.refusal = None
        asked.set()

    http = httpx.Client(event_hooks={"response": [relent]}, timeout=PATIENCE)
    with openai.OpenAI(base_url=held, api_key="none", max_retries=1, http_client=http) as client:
        answer = client.completions.create(model="parrot", prompt="one two")

    assert asked.is_set() and answer.choices[0].text == "onetwo" and len(driver.submitted) == 2


def test_a_client_that_waits_no_longer_has_its_request_aborted(held: str, driver: FakeDriver) -> None:
    """Its timeout ends it."""
    with openai.OpenAI(base_url=held, api_key="none", max_retries=0) as client:
        while driver.held.empty():  # on a busy machine it may not have come so far
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(model="parrot", prompt="hold", timeout=0.5)
        assert driver.aborted.get(timeout=PATIENCE) == driver.take().request_id


def test_a_client_that_leaves_has_its_request_aborted(held: str, driver: FakeDriver) -> None:
    """By closing a stream in the middle, or the task that reads it."""
    with openai.OpenAI(base_url=held, api_key="none", max_retries=0) as client:

        def speak() -> None:
            driver.say(driver.take(), "so far", [1])

        threading.Thread(target=speak).start()
        with client.completions.create(model="parrot", prompt="hold", stream=True) as stream:
            assert next(iter(stream)).choices[0].text == "so far"
        assert driver.aborted.get(timeout=PATIENCE) == driver.submitted[-1].request_id

    async def give_up() -> None:
        async with openai.AsyncOpenAI(base_url=held, api_key="none") as client:
            asking = asyncio.create_task(client.completions.create(model="parrot", prompt="hold"))
            request = await asyncio.to_thread(driver.take)
            asking.cancel()
            assert await asyncio.to_thread(driver.aborted.get, timeout=PATIENCE) == request.request_id

    asyncio.run(give_up())


def test_the_chapters_python_prints_what_it_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter, but for the port."""
    example, _, expected = CHAPTER.partition("```python\n")[2].partition("```\n\n```text\n")
    assert "openai" in example

    names: dict[str, Any] = {}
    exec(example.replace("localhost:8000", url.removeprefix("http://")), names)
    names["client"].close()  # or else its socket is collected while it is open, in whatever test that is

    assert capsys.readouterr().out == expected.partition("```")[0]


def test_the_chapters_curl_commands_answer_what_it_says(url: str, tmp_path: Path) -> None:
    """Every field that is shown there, with its value, but for what is another each time; or the beginning of an error."""
    blocks = re.findall(r"(?<!another machine -->\n)```console\n(.*?)```", CHAPTER, re.DOTALL)
    shown = re.findall(r"^\$ (curl (?:.|\n )*)\n(\{.*)", "".join(blocks), re.MULTILINE)
    assert shown
    (tmp_path / ".curlrc").write_text(f'connect-to = "localhost:8000:{url.removeprefix("http://")}"\n')
    for command, expected in shown:
        told = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            env={**os.environ, "CURL_HOME": str(tmp_path)},
            text=True,
            check=True,
        )

        if expected.endswith("..."):
            assert told.stdout.startswith(expected.removesuffix("..."))
            continue
        assert steady(json.loads(told.stdout)) == steady(json.loads(expected.replace(":...", ":0")))


def test_the_chapters_api_keys_admit_its_curl(tmp_path: Path) -> None:
    """The file that is shown there is one, and the key that curl sends is alice's."""
    path = tmp_path / "api-keys.toml"
    path.touch(mode=0o600)
    path.write_text(CHAPTER.partition("file: api-keys.toml -->\n```toml\n")[2].partition("```")[0])
    (header,) = re.findall(r'curl https:.* -H "Authorization: (.*)"', CHAPTER)

    assert Callers(path).identified(header).name == "alice"


def steady(answer: dict[str, object]) -> dict[str, object]:
    """Less what is another each time."""
    return answer | {"id": str(answer["id"]).partition("-")[0], "created": 0, "timings": 0}
