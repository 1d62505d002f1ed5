"""``/v1/completions`` and ``/v1/chat/completions`` of a gateway in this process, over a driver that echoes words."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_driver import FakeDriver
from gateways import CHAT, TEXT, chat, events, gateway

from driver.errors import Draining, Overloaded
from driver.request import Logprob, ReturnSample


@pytest.fixture
def http(address: str, driver: FakeDriver) -> Iterator[httpx.Client]:
    """A client of the gateway under test."""
    del driver
    with gateway(address) as client:
        yield client


def test_a_chat_is_answered_whole(http: httpx.Client, driver: FakeDriver) -> None:
    """In OpenAI's shape; parameters of either world arrive."""
    body = chat("what is it", model="parrot", max_completion_tokens=9, top_k=4, user="u")

    answer = http.post(CHAT, json=body, headers={"X-Request-Id": "mine"})

    told = answer.json()
    assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine"
    assert told.pop("created") > 1_700_000_000
    assert told == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "parrot",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "whatisit"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
    }
    assert driver.submitted[0].params == {"max_tokens": 9, "top_k": 4}
    assert driver.submitted[0].messages == body["messages"]


def test_a_chat_is_streamed(http: httpx.Client) -> None:
    """Every chunk has the id; the first says who speaks, the last why it ended, and one more what it cost."""
    body = chat("what is it", stream=True, stream_options={"include_usage": True})

    with http.stream("POST", CHAT, json=body) as answer:
        *chunks, total = events(answer)

    assert {chunk["id"] for chunk in chunks} == {total["id"]} == {f"chatcmpl-{answer.headers['X-Request-Id']}"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "whatisit"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert (total["choices"], total["usage"]["total_tokens"], chunks[0]["usage"]) == ([], 4, None)


def streamed(stream: bool) -> dict[str, Any]:
    """What a body has where the usage is told in any case."""
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_a_list_of_prompts_is_continued(http: httpx.Client, stream: bool) -> None:
    """The choices are numbered through, and the usage is that of all."""
    body = {"prompt": ["one two", "three"], **streamed(stream)}

    answer = http.post(TEXT, json=body)

    told = events(answer) if stream else [answer.json()]
    texts = {0: "", 1: ""}
    for choice in (choice for chunk in told for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "onetwo", 1: "three"}
    assert told[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream_options": {}}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"suffix": "the end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    http: httpx.Client, driver: FakeDriver, body: dict[str, Any], param: str
) -> None:
    """With 400, in OpenAI's shape, and the daemon never hears of it."""
    answer = http.post(TEXT, json={"prompt": "x", **body})

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.split(".")[-1] in error["message"] and not driver.submitted


def test_another_model_is_not_found(http: httpx.Client) -> None:
    """With the code that OpenAI's clients know."""
    answer = http.post(TEXT, json={"prompt": "x", "model": "owl"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["parrot"]
    assert http.get("/v1/models/parrot").json()["max_model_len"] == 256
    assert http.get("/v1/models/owl").status_code == 404


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [(Overloaded("too many wait", 2.4), 503, "3"), (Draining("it ends"), 503, "1")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_daemon_that_takes_no_work_says_when_to_come_again(
    http: httpx.Client, driver: FakeDriver, refusal: Any, status: int, retry_after: str, stream: bool
) -> None:
    """As a status, also where a stream was asked for."""
    driver.refusal = refusal

    answer = http.post(CHAT, json=chat("x", stream=stream))

    assert (answer.status_code, answer.headers["Retry-After"]) == (status, retry_after)
    assert answer.json()["error"]["message"] == str(refusal)


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_has_the_request_aborted(http: httpx.Client, driver: FakeDriver, stream: bool) -> None:
    """Whether something has come by then or not."""
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=chat("hold", stream=stream), timeout=0.5)

    assert driver.aborted.get(timeout=60) == driver.take().request_id


def test_what_fails_in_mid_stream_is_an_event(http: httpx.Client, driver: FakeDriver) -> None:
    """For a status it is too late by then."""
    saying = threading.Thread(target=lambda: driver.say(driver.take(), "so far", [1]))
    saying.start()
    with http.stream("POST", CHAT, json=chat("hold", stream=True)) as answer:
        lines = answer.iter_lines()
        assert '"role":"assistant"' in next(lines)
        driver.stop("the device is on fire")
        rest = "".join(lines)

    assert '"error":{"message":"the device is on fire"' in rest and rest.endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/chat", 404), ("POST", "/health", 405), ("GET", "/nothing", 404)],
)
def test_wrong_ways_in_are_told_so(http: httpx.Client, method: str, path: str, status: int) -> None:
    """In OpenAI's shape as well."""
    answer = http.request(method, path)

    assert answer.status_code == status and answer.json()["error"]["type"]
    assert http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_each_sample(http: httpx.Client, stream: bool) -> None:
    """Of a text as it is, of token ids their text."""
    body = {"prompt": "one two", "echo": True, "stream": stream}

    answer = http.post(TEXT, json=body)

    told = events(answer) if stream else [answer.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == "one twoonetwo"


def score(driver: FakeDriver) -> None:
    """Answer a held request of two tokens with one more, and with log-probabilities of all."""
    request = driver.take()
    assert request.prompt == [3, 5] and request.params | {"prompt_logprobs": 1, "logprobs": 1} == request.params
    token = {2: Logprob(-0.5, 1, "aa")}
    sample = ReturnSample(
        request_id=request.request_id,
        text="aa",
        token_ids=[2],
        logprobs=[token],
        prompt_logprobs=[None, {5: Logprob(-2.0, 9, " five"), 4: Logprob(-1.0, 1, " top")}],
    )
    request.channel.put(sample)
    driver.finish(request, "length", 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["thr fivee", [3, 5]])
def test_a_prompt_is_scored(
    http: httpx.Client, driver: FakeDriver, prompt: str | list[int], max_tokens: int, stream: bool
) -> None:
    """Log-probabilities of the prompt come before those of the output, of which there may be none: what lm-eval reads."""
    scoring = threading.Thread(target=score, args=(driver,))
    scoring.start()
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}

    answer = http.post(TEXT, json={**body, **streamed(stream)})

    told = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in told for choice in chunk["choices"]]
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    text = prompt if isinstance(prompt, str) else "xxx xxxxx"
    tokens = [("xxx", None, 0), (" five", -2.0, 3), ("aa", -0.5, len(text))][: 2 + max_tokens]
    assert "".join(choice["text"] for choice in choices) == text + "aa" * max_tokens
    names = ("tokens", "token_logprobs", "text_offset")
    assert [row for column in columns for row in zip(*(column[name] for name in names), strict=True)] == tokens
    assert columns[0]["top_logprobs"][:2] == [None, {" five": -2.0, " top": -1.0}]
    assert told[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": max_tokens, "total_tokens": 1 + max_tokens}
