"""``/v1/completions`` and ``/v1/chat/completions`` of a gateway in this process, over a driver that echoes words."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import CHAT, TEXT, chat, events, gateway
from msgspec import UNSET
from test_client import Router

from driver.errors import Draining, Overloaded
from driver.request import ActiveRequest, Logprob, ReturnSample, Timings, Usage
from ipc.gateway.endpoints.echo import Echo, _num_behind
from ipc.gateway.endpoints.stream_usage import StreamUsage
from ipc.gateway.endpoints.text_chunks import TextChunks
from ipc.openai.answer_bodies import TextChoice, TextCompletion
from ipc.openai.answer_format import AnswerFormat
from ipc.wire.completion import Completion, Piece
from ipc.wire.messages import Abort, Tokenize


@pytest.fixture
def http(address: str, driver: FakeDriver) -> Iterator[httpx.Client]:
    """A client of the gateway under test."""
    del driver
    with gateway(address) as client:
        yield client


def give(driver: FakeDriver, groups: list[int]) -> None:
    """Answers a request with the letters a to f, so many in each sample, and their log-probabilities."""
    request, start = driver.take(), 0
    for count in groups:
        letters = "abcdef"[start : start + count]
        sample = ReturnSample(
            request_id=request.request_id,
            text=letters,
            token_ids=list(letters.encode()),
            logprobs=[{ord(one): Logprob(-ord(one) / 8, 1, one)} for one in letters],
        )
        request.channel.put(sample)
        start += count
    driver.finish(request, "length", 6)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_is_the_same_however_many_tokens_a_piece_has(
    http: httpx.Client, driver: FakeDriver, path: str
) -> None:
    """Its text, the log-probabilities with the places of their tokens, and the usage."""
    body = chat("hold", logprobs=True) if path == CHAT else {"prompt": "hold", "logprobs": 1}
    told = []
    for groups in ([1] * 6, [3, 1, 2], [6]):
        answering = threading.Thread(target=give, args=(driver, groups))
        answering.start()
        chunks = events(http.post(path, json={**body, **streamed(True)}))
        answering.join()
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        columns = {name: [value for one in found for value in one[name]] for name in found[0]}
        text = "".join(choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices)
        told.append((text, columns, chunks[-1]["usage"]))

    assert told[0] == told[1] == told[2] and told[0][0] == "abcdef"
    assert all(len(column) == 6 for column in told[0][1].values())


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class TimedDriver(FakeDriver):
    """Has half of each prompt of two tokens in its cache, and says how long it took."""

    def finish(self, request: ActiveRequest, reason: str = "stop", num_tokens: int = 0) -> None:
        del self.open[request.request_id]
        took = Timings(
            queue_time_s=0.5, prefill_time_s=0.25, time_to_first_token_s=0.75, decode_time_s=2.0, tokens_per_second=1.5
        )
        usage = Usage(2, num_tokens, 1, took)
        request.channel.put(ReturnSample(request_id=request.request_id, finish_reason=reason, usage=usage))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_how_long_it_took_and_belongs_to_the_callers_trace(address: str, stream: bool) -> None:
    """By llama.cpp's names, where the usage is; several prompts have no time of their own, and a trace has to be one."""
    asked = streamed(stream)
    trace = {"traceparent": TRACEPARENT}
    with serving(address, driver := TimedDriver()), gateway(address) as client:
        answers = [
            client.post(CHAT, json=chat("what is it", **asked), headers=trace),
            client.post(TEXT, json={"prompt": "what is it", **asked}, headers={"traceparent": "nonsense"}),
            client.post(TEXT, json={"prompt": ["what", "is"], **asked}),
        ]
        response = client.post("/v1/responses", json={"input": "what is it"}, headers=trace).json()
        told = [events(answer)[-1] if stream else answer.json() for answer in answers]

    took = {
        "cache_n": 1, "prompt_n": 1, "prompt_ms": 250.0, "prompt_per_second": 4.0, "predicted_n": 3,
        "predicted_ms": 2000.0, "predicted_per_second": 1.5, "queued_ms": 500.0,
    }  # fmt: skip
    assert [one.get("timings") for one in told] == [took, took, None]
    assert response["timings"] == took
    assert told[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert [request.traceparent for request in driver.submitted] == [TRACEPARENT, "", "", "", TRACEPARENT]


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Of a prompt of which nothing was cached."""
    total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**total, "prompt_tokens_details": {"cached_tokens": 0}}


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
                "stop_reason": None,
            }
        ],
        "usage": usage(1, 3),
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
    assert told[-1]["usage"] == usage(2, 3)


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
    assert (shown := http.get("/v1/models/owl")).status_code == 404 and shown.json() == answer.json()


@pytest.mark.parametrize("body", [{"prompt": "x"}, chat("x"), {"input": "x"}])
def test_an_empty_name_is_none(http: httpx.Client, body: dict[str, Any]) -> None:
    """As some programs send where nothing is set."""
    path = TEXT if "prompt" in body else CHAT if "messages" in body else "/v1/responses"

    assert http.post(path, json={**body, "model": ""}).json()["model"] == "parrot"


def test_a_model_with_several_names_answers_to_each(address: str) -> None:
    """All are listed, with what the model takes for what is left out; a reply has the name that was asked for."""
    own = {"temperature": 0.6, "top_p": 0.9}
    with serving(address, FakeDriver(), aliases=["gpt-4", "tiny"], defaults=own), gateway(address) as http:
        models = http.get("/v1/models").json()["data"]
        named = [http.post(TEXT, json={"prompt": "x", "model": name}).json()["model"] for name in ("gpt-4", "parrot")]
        chat = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "model": "tiny"}).json()["model"]
        unnamed = http.post(TEXT, json={"prompt": "x"}).json()["model"]
        response = http.post("/v1/responses", json={"input": "x", "model": "gpt-4", "top_p": 0.5}).json()
        other = http.post(TEXT, json={"prompt": "x", "model": "gpt-5"})

    assert [(model["id"], model["root"]) for model in models] == [
        (name, "parrot") for name in ("parrot", "gpt-4", "tiny")
    ]
    assert all(model["default_sampling_params"] == own for model in models)
    assert (named, chat, unnamed) == (["gpt-4", "parrot"], "tiny", "parrot")
    assert (response["model"], response["temperature"], response["top_p"]) == ("gpt-4", 0.6, 0.5)
    assert other.status_code == 404 and "parrot and gpt-4 and tiny are served" in other.json()["error"]["message"]


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
    body = json.dumps(chat("hold", stream=stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
        connection.sendall(head.encode() + body)
        request = driver.take()

    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x"}), (TEXT, {"prompt": "x", "echo": True, "logprobs": 1})]
)
def test_who_hangs_up_while_a_prompt_is_tokenised_has_that_aborted(
    address: str, path: str, body: dict[str, Any]
) -> None:
    """As it may have to wait for a daemon that is away; the gateway works on nothing for nobody."""
    router, content = Router(address), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with gateway(address, resume_timeout=PATIENCE) as http:
        router.welcome()
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
            connection.sendall(head.encode() + content)
            asked = router.hear()
            assert isinstance(asked, Tokenize)
        assert router.hear() == Abort(asked.request_id)
        router.die()


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


def test_the_log_warns_of_what_fails(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, whatever the status; what ends in order, or is to come again, is no more than told."""
    caplog.set_level(logging.INFO, "ipc.gateway.request_id")
    driver = FakeDriver()

    def fail(*, stream: bool) -> None:
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(http.post, CHAT, json=chat("hold", stream=stream))
            driver.say(driver.take(), "so far", [1])
            driver.fail("the device is on fire")
            asking.result()

    with serving(address, driver), gateway(address) as http:
        answering = threading.Thread(target=lambda: driver.say(driver.take(), "so far", [1]))
        answering.start()
        with http.stream("POST", CHAT, json=chat("hold", stream=True)) as leaving:
            next(leaving.iter_lines())
        answering.join()
        driver.aborted.get(timeout=PATIENCE)  # who leaves is no fault
        fail(stream=True)
        fail(stream=False)
        http.post(TEXT, json={"prompt": "x", "stream": True})
        driver.refusal = Draining("it ends")
        http.post(TEXT, json={"prompt": "x"})

    told = [record for record in caplog.records if record.name == "ipc.gateway.request_id"]
    assert {
        (one.levelname, one.message.split()[3], one.message.partition(", ")[2].partition(", ")[2]) for one in told
    } == {
        ("WARNING", "200", "broken off: the device is on fire"),
        ("WARNING", "500", "failed: the device is on fire"),
        ("INFO", "200", ""),
        ("INFO", "503", ""),
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/chat", 404), ("POST", "/health", 405), ("GET", "/nothing", 404)],
)
def test_wrong_ways_in_are_told_so(http: httpx.Client, method: str, path: str, status: int) -> None:
    """In OpenAI's shape as well."""
    answer = http.request(method, path)

    assert answer.status_code == status and answer.json()["error"]["type"]
    assert http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_an_address_that_is_not_here_and_a_body_that_is_missing_are_named(http: httpx.Client) -> None:
    """As a client has them whose base_url lacks /v1."""
    lost, empty = http.post("/chat/completions", json={}), http.post(CHAT)

    assert lost.json()["error"]["message"].startswith("there is nothing at /chat/completions: OpenAI's addresses begin")
    assert (empty.status_code, empty.json()["error"]["message"]) == (400, "there is no body: send one in JSON")


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_each_sample(http: httpx.Client, stream: bool) -> None:
    """Of a text as it is, of token ids their text."""
    body = {"prompt": "one two", "echo": True, "stream": stream}

    answer = http.post(TEXT, json=body)

    told = events(answer) if stream else [answer.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == "one twoonetwo"


PROMPT_IN_CHUNKS: Any = [None, {5: Logprob(-2.0, 9, " five")}, {6: Logprob(-3.0, 8, " sixsix")}]
"""Log-probabilities of a prompt of which each token is read in a step of its own."""


def take_and_say(driver: FakeDriver) -> ActiveRequest:
    """The request that is held, of whose prompt the first token has been read."""
    request = driver.take()
    request.channel.put(ReturnSample(request_id=request.request_id, prompt_logprobs=PROMPT_IN_CHUNKS[:1]))
    return request


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_log_probabilities_of_a_prompt_that_is_read_in_chunks_are_all_told(
    http: httpx.Client, driver: FakeDriver, path: str
) -> None:
    """Streamed, too: those of the later chunks are as much the prompt's as the first."""
    body = chat("hold", prompt_logprobs=1) if path == CHAT else {"prompt": "hold", "prompt_logprobs": 1}
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(take_and_say, driver)
        with http.stream("POST", path, json={**body, "stream": True}) as answer:
            lines, told, request = (line for line in answer.iter_lines() if line), [], taking.result()
            for token in PROMPT_IN_CHUNKS[1:]:
                told.append(next(lines))
                request.channel.put(ReturnSample(request_id=request.request_id, prompt_logprobs=[token]))
            told.append(next(lines))
            driver.finish(request, "length", 1)

    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in told]
    assert [token and next(iter(token)) for choice in choices for token in choice["prompt_logprobs"]] == [
        None,
        "5",
        "6",
    ]


def test_an_echo_has_what_is_known_of_all_of_its_prompt() -> None:
    """A prompt that is read in chunks is scored to its end before it is said."""
    answer_format = AnswerFormat(1)
    echo = Echo("xxx xxxxx xxxxxx", "xxx", answer_format, alone=False)
    chunks = TextChunks("a", "parrot", 0, answer_format, StreamUsage(None, included=False), [UNSET])

    said = [echo.chunks(chunks, Piece("", [], prompt_logprobs=[token]), 0, 0) for token in PROMPT_IN_CHUNKS]
    said.append(echo.chunks(chunks, Piece("aa", [2], logprobs=[{2: Logprob(-0.5, 1, "aa")}]), 0, 0))

    assert said[:3] == [[], [], []]
    columns = [chunk.choices[0].logprobs for chunk in said[3]]
    assert [value for column in columns if column for value in column.token_logprobs] == [None, -2.0, -3.0, -0.5]


@pytest.mark.parametrize("plain", [[5, 6], [5, 6, 7], [5, 6, 7, 8]])
def test_what_a_tokenizer_puts_around_a_text_is_at_its_ends(plain: list[int]) -> None:
    """A token that begins all texts, the space before their first word, and what ends them; others are where they are."""
    num_behind = _num_behind([1, 5, 6, 7, 8], plain)
    text = "Hi you" + "</s>" * (2 - num_behind)
    echo = Echo(text, "<s>", AnswerFormat(1), alone=True, num_behind=num_behind)
    known = [
        None,
        *({5 + place: Logprob(-2.0, 1, token)} for place, token in enumerate((" Hi", " you", "</s>", "</s>"))),
    ]

    answer = TextCompletion(id="a", model="parrot", choices=[TextChoice(index=0, text="")])
    whole = echo.before(Completion([], Usage(5, 0), known), answer)

    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.text_offset == [
        0,
        0,
        2,
        6,
        min(10, len(text)),
    ]


def score(driver: FakeDriver) -> None:
    """Answer a held request of two tokens with one more, which ends it, and with log-probabilities of all."""
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
    driver.finish(request, "stop", 1)


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
    assert choices[-1]["finish_reason"] == ("stop" if max_tokens else "length")
    assert told[-1]["usage"] == usage(1, max_tokens)
