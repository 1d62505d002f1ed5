"""What other programs send and expect: bodies as they were sent, answers as OpenAI's own types have them, strictly."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import llguidance
import msgspec
import pydantic
import pytest
from fake_driver import FakeDriver, serving
from gateways import CHAT, TEXT, chat, events, gateway
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from recorded_bodies import CHATS, RESPONSES
from test_gateway_tools import ScriptedDriver

from driver.errors import ContextLengthExceeded, InvalidRequest
from driver.request import Logprob, ReturnSample, Usage

CALLED = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}]}  # fmt: skip
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
TEMPLATE = "{{ tools }}{{ messages }}{{ tool_calls }}<tool_call><think></think>{% if enable_thinking %}{% endif %}"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, ScriptedDriver]]:
    """A gateway to a driver that says what the last message says."""
    driver, address = ScriptedDriver(), f"ipc://{tmp_path_factory.mktemp('scripted')}/o.sock"
    with serving(address, driver), gateway(address) as http:
        yield http, driver


@pytest.fixture
def http(scripted: tuple[httpx.Client, ScriptedDriver]) -> httpx.Client:
    """The gateway; its driver has heard nothing yet."""
    scripted[1].submitted.clear()
    return scripted[0]


@pytest.fixture
def driver(scripted: tuple[httpx.Client, ScriptedDriver]) -> ScriptedDriver:
    """What the gateway asks."""
    return scripted[1]


def response_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a streamed response."""
    blocks = answer.read().decode().strip().split("\n\n")
    return [msgspec.json.decode(block.partition("data: ")[2]) for block in blocks]


@pytest.mark.parametrize("client", CHATS)
def test_what_chat_clients_send_is_answered(http: httpx.Client, driver: ScriptedDriver, client: str) -> None:
    """In OpenAI's types, whole or chunk by chunk; the driver hears the last message as it was meant."""
    body = CHATS[client]

    answer = http.post(CHAT, json=body)

    assert answer.status_code == 200, answer.text
    last = body["messages"][-1]["content"]
    said = last if isinstance(last, str) else "".join(part["text"] for part in last)
    assert driver.submitted[0].messages is not None and driver.submitted[0].messages[-1]["content"] == said
    if not body.get("stream"):
        whole = ChatCompletion.model_validate_json(answer.content, strict=True)
        assert whole.choices[0].message.content == said
        return
    chunks = [ChatCompletionChunk.model_validate_json(msgspec.json.encode(one), strict=True) for one in events(answer)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert (chunks[-1].usage is not None) == ("stream_options" in body)


def test_a_refusal_of_another_model_is_what_it_said(http: httpx.Client, driver: ScriptedDriver) -> None:
    """A conversation goes on here that began elsewhere."""
    refused = {"role": "assistant", "content": None, "refusal": "I would rather not."}

    assert http.post(CHAT, json={"messages": [refused, {"role": "user", "content": "Please."}]}).status_code == 200

    assert (driver.submitted[0].messages or [])[0] == {"role": "assistant", "content": "I would rather not."}


def test_a_refusal_may_be_a_part(http: httpx.Client, driver: ScriptedDriver) -> None:
    """Of either API's content."""
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not."}]}
    turns = [refused, {"role": "user", "content": "Please."}]
    for path, field in ((CHAT, "messages"), ("/v1/responses", "input")):
        assert http.post(path, json={field: turns}).status_code == 200

    heard = [(request.messages or [])[0] for request in driver.submitted]
    assert heard == [{"role": "assistant", "content": "I would rather not."}] * 2


@pytest.mark.parametrize("client", RESPONSES)
def test_what_responses_clients_send_is_answered(http: httpx.Client, driver: ScriptedDriver, client: str) -> None:
    """A call and its result go back as turns of the conversation."""
    body = RESPONSES[client]

    answer = http.post("/v1/responses", json=body)

    assert answer.status_code == 200, answer.text
    heard = driver.submitted[0].messages
    assert heard is not None and [message["role"] for message in heard][-2:] == ["assistant", "tool"]
    assert heard[-2]["tool_calls"] == CALLED["tool_calls"]
    assert heard[-2].get("reasoning_content") == (None if client == "codex" else "I list.")
    if not body["stream"]:
        assert Response.model_validate_json(answer.content, strict=True).output_text == heard[-1]["content"]
        return
    told = [EVENTS.validate_json(msgspec.json.encode(one), strict=True) for one in response_events(answer)]
    assert told[-1].type == "response.completed" and told[-1].response.output_text == heard[-1]["content"]


def test_reasoning_comes_back_in_what_is_opaque_to_clients(http: httpx.Client, driver: ScriptedDriver) -> None:
    """A client that stores nothing keeps of the reasoning its ``encrypted_content`` alone."""
    body = {"input": "<think>Hm.</think>Yes.", "include": ["reasoning.encrypted_content"], "store": False}
    thought, _ = http.post("/v1/responses", json=body).json()["output"]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}

    http.post("/v1/responses", json={"input": [kept, {"role": "assistant", "content": "Yes."}]})

    assert (driver.submitted[1].messages or [])[0] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "Yes.",
    }


@pytest.mark.parametrize(
    ("fields", "switches"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"verbosity": "high"}, {}),
    ],
)
def test_hints_become_switches_of_the_template(
    http: httpx.Client, driver: ScriptedDriver, fields: dict[str, Any], switches: dict[str, Any]
) -> None:
    """Of one that has such a switch; what the request itself switches stays."""
    assert http.post(CHAT, json=chat("x", **fields)).status_code == 200

    assert driver.submitted[0].chat_template_kwargs == switches


def test_a_template_that_reads_the_effort_gets_it(address: str) -> None:
    """From either API."""
    template = "{{ reasoning_effort }}{{ verbosity }}{{ messages }}"
    with serving(address, driver := ScriptedDriver(template)), gateway(address) as http:
        http.post(CHAT, json=chat("x", reasoning_effort="high", verbosity="low"))
        http.post(
            "/v1/responses", json={"input": "x", "reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}}
        )

    assert [request.chat_template_kwargs for request in driver.submitted] == [
        {"reasoning_effort": "high", "verbosity": "low"},
        {"reasoning_effort": "none", "verbosity": "medium"},
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("x"), "messages"),
        (CHAT, chat("x", stream=True), "messages"),
        (TEXT, {"prompt": "x"}, "prompt"),
        ("/v1/responses", {"input": "x"}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_openai_tells_it(
    address: str, path: str, body: dict[str, Any], param: str
) -> None:
    """Clients look for the code, or for the words, and shorten the conversation."""
    driver = FakeDriver()
    driver.refusal = ContextLengthExceeded(256, "the prompt has 300 tokens", "shorten it")
    with serving(address, driver), gateway(address) as http:
        answer = http.post(path, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["type"] == "invalid_request_error" and "maximum context length is 256 tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        ("stop", None, ("stop", None)),
        ("stop", "\n", ("stop", "\n")),
        ("stop", 7, ("stop", 7)),
        ("length", None, ("length", None)),
        ("repetition", None, ("stop", "repetition")),
        ("timeout", None, ("length", "timeout")),
        ("abort", None, ("length", "abort")),
    ],
)
@pytest.mark.parametrize("path", [CHAT, pytest.param(TEXT, marks=pytest.mark.thorough)])
def test_finish_reasons_are_openais_and_ours_the_stop_reason(
    address: str, path: str, reason: str, stop_reason: int | str | None, told: tuple[str, object], stream: bool
) -> None:
    """As in vLLM; it has the stop string or token as well."""

    class Ending(FakeDriver):
        def submit_request(self, request: Any) -> None:
            end = ReturnSample(
                request_id=request.request_id,
                text="x",
                token_ids=[7],
                finish_reason=reason,
                stop_reason=stop_reason,
                usage=Usage(9, 1, 8),
            )
            request.channel.put(end)

    body = chat("x") if path == CHAT else {"prompt": "x"}
    with serving(address, Ending()), gateway(address) as http:
        answer = http.post(
            path, json={**body, "stream": stream, "stream_options": {"include_usage": True}} if stream else body
        )
        answers = events(answer) if stream else [answer.json()]

    last = next(one["choices"][0] for one in reversed(answers) if one["choices"])
    assert (last["finish_reason"], last["stop_reason"]) == told
    assert answers[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    if not stream:
        kind = ChatCompletion if path == CHAT else Completion
        kind.model_validate_json(answer.content, strict=True)


def test_a_response_that_was_cut_off_says_so_in_openais_words(address: str) -> None:
    """And in ours beside them; what was cached is told."""
    driver = FakeDriver()
    driver.submit_request = lambda request: request.channel.put(  # type: ignore[method-assign]
        ReturnSample(request_id=request.request_id, text="x", finish_reason="timeout", usage=Usage(9, 1, 8))
    )
    with serving(address, driver), gateway(address) as http:
        answer = http.post("/v1/responses", json={"input": "x"})

    told = Response.model_validate_json(answer.content, strict=True)
    assert told.incomplete_details is not None and told.usage is not None
    assert told.incomplete_details.to_dict() == {"reason": "max_output_tokens", "stop_reason": "timeout"}
    assert told.usage.input_tokens_details.cached_tokens == 8


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"input_audio": {}, "type": "input_audio"}]}]}, "messages[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]}, "input[0].output[0]"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_in_words(http: httpx.Client, path: str, body: dict[str, Any], where: str) -> None:
    """Wherever the type stands in the part."""
    answer = http.post(path, json=body)

    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == f"{where}.type"
    assert error["message"].startswith(f"{where}: this model takes text alone")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("x", modalities=["text", "audio"]), "modalities[1]"),
        (CHAT, chat("x", reasoning_effort="enormous"), "reasoning_effort"),
        (CHAT, chat("x", use_beam_search=True), "use_beam_search"),
        (CHAT, chat("x", options={"num_ctx": 8}), "options"),
        (CHAT, chat("x", logprobs=True, top_logprobs=30), "top_logprobs"),
        (CHAT, chat("x", max_completion_tokens=0), "max_completion_tokens"),
        (CHAT, chat("x", logit_bias={"5": None}), "logit_bias[...]"),
        (CHAT, chat("x", request_id="a b"), "request_id"),
        (CHAT, chat("x", add_special_tokens=True), "add_special_tokens"),
        (CHAT, chat("x", echo=True), "echo"),
        (CHAT, chat("x", seed=2**63), "seed"),
        (CHAT, chat("x", truncation_side="right"), "truncation_side"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a", "refusal": "b"}]}]}, "messages[0].content[0]"),
        (CHAT, chat("x", tools=[{"type": "function", "function": {"name": "f\n"}}]), "tools[0].function.name"),
        (TEXT, {"prompt": "x", "echo": True, "return_token_ids": True}, "return_token_ids"),
        ("/v1/responses", {"input": "x", "truncation": "middle"}, "truncation"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ],
)
def test_nothing_is_ignored_silently(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    """What nobody has heard of, or what would change the answer and cannot be done."""
    answer = http.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"functions": None, "function_call": None, "audio": None, "prediction": None}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None, "other": None}}),
        (CHAT, {"tools": [{"type": None, "function": {"name": "f", "other": None}}]}),
        ("/v1/responses", {"prompt": None, "max_tool_calls": None}),
    ],
)
def test_a_null_is_no_field(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Also of a name that is not known: some clients write all that they know of."""
    asked = {"messages": [{"role": "user", "content": "x", "other": None}]} if path == CHAT else {"input": "x"}

    answer = http.post(path, json={**asked, **body})

    assert answer.status_code == 200, answer.text


def test_a_null_in_a_schema_is_one(http: httpx.Client, driver: ScriptedDriver) -> None:
    """It says what may come."""
    schema = {"type": ["integer", "null"], "default": None, "enum": [1, None]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "other": None}}

    assert http.post(CHAT, json=chat("x", response_format=form)).status_code == 200

    grammar = driver.submitted[0].params["structured_outputs"]["grammar"]
    assert '"default": null, "enum": [1, null]' in grammar


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_come_with_the_answer_where_wanted(address: str, path: str, stream: bool) -> None:
    """Those of the prompt once; so far as it is used, and with the tokens' ids for names, as vLLM does."""
    body: dict[str, Any] = chat("one three", logprobs=True) if path == CHAT else {"prompt": "one three", "logprobs": 1}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}

    class Ending(FakeDriver):
        def submit_request(self, request: Any) -> None:
            logprobs = [{7: Logprob(-0.5, 1, "\ufffd", b"\xf0\x9f"), 8: Logprob(-1.0, 2, "b")}]
            end = {"finish_reason": "length", "usage": Usage(2, 1)}
            request.channel.put(
                ReturnSample(request_id=request.request_id, text="x", token_ids=[7], logprobs=logprobs, **end)
            )

    with serving(address, Ending()), gateway(address) as http:
        answer = http.post(path, json=body)
        answers = events(answer) if stream else [answer.json()]

    choices = [one["choices"][0] for one in answers if one["choices"]]
    prompts = [one["prompt_token_ids"] for one in [*answers, *choices] if "prompt_token_ids" in one]
    assert prompts == [[3, 5]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == [7]
    logprobs = next(choice["logprobs"] for choice in choices if choice["logprobs"])
    if path == CHAT:
        (token,) = logprobs["content"]
        assert (token["token"], token["bytes"]) == ("token_id:7", [0xF0, 0x9F])
    else:
        assert logprobs["tokens"] == ["token_id:7"] and logprobs["top_logprobs"][0].keys() == {
            "token_id:7",
            "token_id:8",
        }
    if stream:
        *chunks, total = answers
        assert [chunk["usage"]["total_tokens"] for chunk in chunks][-1] == total["usage"]["total_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_of_a_text_has_the_ids_of_its_prompt(address: str, stream: bool) -> None:
    """Once, as in vLLM."""

    class Sampling(FakeDriver):
        def submit_request(self, request: Any) -> None:
            for index in (0, 1) * 2:
                self.say(request, "x", [7], index=index)
            for index in (0, 1):
                end = {"finish_reason": "length", "usage": Usage(2, 4) if index else None}
                request.channel.put(ReturnSample(request_id=request.request_id, index=index, **end))

    body = {"prompt": ["one three", "five"], "n": 2, "return_token_ids": True, "stream": stream}
    with serving(address, Sampling()), gateway(address) as http:
        answer = http.post(TEXT, json=body)
        choices = [choice for one in (events(answer) if stream else [answer.json()]) for choice in one["choices"]]

    told = sorted((choice["index"], choice["prompt_token_ids"]) for choice in choices if "prompt_token_ids" in choice)
    assert told == [(0, [3, 5]), (1, [3, 5]), (2, [4]), (3, [4])]


def test_a_prompt_without_special_tokens_is_sent_as_ids(address: str) -> None:
    """As it is tokenised without them."""
    body = {"prompt": "one three", "add_special_tokens": False}
    with serving(address, driver := FakeDriver()), gateway(address) as http, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http.post, TEXT, json=body)
        request = driver.take()
        driver.finish(request, "stop", 2)

    assert request.prompt == [3, 5] and answer.result().status_code == 200


@pytest.mark.parametrize(
    ("given", "heard"), [(5, 5), (-1, None), (None, None), (2**40 + 7, 7), (-2, 2**32 - 2), (2**63 - 1, 2**32 - 1)]
)
def test_a_seed_may_have_64_bits(http: httpx.Client, driver: ScriptedDriver, given: int, heard: int | None) -> None:
    """As OpenAI's and vLLM's."""
    assert http.post(CHAT, json=chat("x", seed=given)).status_code == 200

    assert driver.submitted[0].params.get("seed") == heard


@pytest.mark.parametrize(
    ("why", "params"),
    [
        ("messages[0] must have role and content", ["messages", "input", "prompt"]),
        ("prompt is empty: it must have at least one token", ["messages", "input", "prompt"]),
        ("tools[0] must be of type function", ["tools"] * 3),
        ("chat_template_kwargs: the chat template of this model has no 'x'", ["chat_template_kwargs"] * 3),
        ("the chat template of this model refuses these messages", [None] * 3),
    ],
)
def test_what_is_wrong_is_said_of_the_field_of_the_body(address: str, why: str, params: list[str | None]) -> None:
    """By the driver, and by the name that the request has for it."""
    driver = FakeDriver()
    driver.refusal = InvalidRequest(why)
    bodies = {CHAT: chat("x"), "/v1/responses": {"input": "x"}, TEXT: {"prompt": "x"}}
    with serving(address, driver), gateway(address) as http:
        answers = [http.post(path, json=body) for path, body in bodies.items()]

    assert [answer.json()["error"]["param"] for answer in answers] == params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"temperature": 1e400', "temperature"),
        ('"max_tokens": -1e999', "max_tokens"),
        ('"stop": ["a", 1e400]', "stop[1]"),
    ],
)
def test_a_number_that_no_type_holds_is_named(http: httpx.Client, fields: str, param: str) -> None:
    """JSON has no bounds of numbers."""
    answer = http.post(TEXT, content=f'{{"prompt": "x", {fields}}}')

    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_whole_number_may_have_a_point(http: httpx.Client, driver: ScriptedDriver) -> None:
    """JSON knows no integers: some languages write 8 as 8.0. What is in a schema stays as it is written."""
    schema = '{"type": "integer", "maximum": 8.0}'
    form = f'{{"type": "json_schema", "json_schema": {{"name": "n", "schema": {schema}}}}}'
    said = '"messages": [{"role": "user", "content": "x"}]'

    http.post(CHAT, content=f'{{{said}, "max_tokens": 8.0, "seed": 1e2, "response_format": {form}}}')
    refused = http.post(CHAT, content=f'{{{said}, "max_tokens": 8.5}}')

    params = driver.submitted[0].params
    assert (params["max_tokens"], params["seed"]) == (8, 100) and type(params["max_tokens"]) is int
    assert '"maximum": 8.0' in params["structured_outputs"]["grammar"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"n": 1}, "messages is missing", "messages"),
        (chat("x", tools=[{"type": "function"}]), "tools[0].function is missing", "tools[0].function"),
        (chat("x", structured_outputs={}), "structured_outputs must be exactly one of", "structured_outputs"),
        (chat("x", functions=None, no_such=1), "unknown parameter 'no_such'", "no_such"),
        (chat("x", tempreature=1), "unknown parameter 'tempreature': did you mean 'temperature'?", "tempreature"),
        (
            chat("x", stream_options={"include_usages": True}),
            "unknown parameter 'stream_options.include_usages': did you mean 'include_usage'?",
            "stream_options.include_usages",
        ),
    ],
)
def test_a_refusal_names_the_field_that_is_wrong(
    http: httpx.Client, body: dict[str, Any], message: str, param: str
) -> None:
    """Also one that is not there, once, and not a null beside it that is as good as none."""
    error = http.post(CHAT, json=body).json()["error"]

    assert error["message"].startswith(message) and error["param"] == param


def test_what_vllms_clients_write_of_its_defaults_is_taken(http: httpx.Client) -> None:
    """It asks for nothing."""
    body = chat("x", echo=False, truncation_side="left", session_id="s", use_beam_search=False)

    assert http.post(CHAT, json=body).status_code == 200
    assert http.post("/tokenize", json={"prompt": "x", "return_token_strs": False}).status_code == 200


def test_a_request_can_be_named_in_its_body(http: httpx.Client) -> None:
    """As in vLLM; a name in the head comes first."""
    named = http.post(CHAT, json=chat("x", request_id="mine"))
    twice = http.post(CHAT, json=chat("x", request_id="mine"), headers={"X-Request-Id": "yours"})

    assert (named.json()["id"], named.headers["X-Request-Id"]) == ("chatcmpl-mine", "mine")
    assert twice.json()["id"] == "chatcmpl-yours"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded", "Origin": "https://elsewhere"}, 415),
        ({"Sec-Fetch-Site": "cross-site"}, 415),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_curl_need_not_say_that_it_is_json(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    """A browser must: it asks before it sends JSON for a page from elsewhere."""
    assert http.post(CHAT, content=msgspec.json.encode(chat("x")), headers=headers).status_code == status


def test_vllms_addresses_are_there(http: httpx.Client) -> None:
    """For load balancers and the like."""
    assert http.get("/ping").json()["status"] == "ok"
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json()["version"].split(".")[0].isdecimal()


def test_what_follows_a_trigger_has_its_form(http: httpx.Client, driver: ScriptedDriver) -> None:
    """vLLM's structural tags: the rest is free."""
    tag = {"begin": "<f=g>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "end": "</f>"}
    body = chat("x", response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<f="]})

    assert http.post(CHAT, json=body).status_code == 200
    stray = {**body["response_format"], "triggers": ["<h="]}
    refused = http.post(CHAT, json={**body, "response_format": stray})
    many = {**body["response_format"], "triggers": ["<h="] * 513}
    assert (
        http.post(CHAT, json={**body, "response_format": many}).json()["error"]["param"] == "response_format.triggers"
    )

    grammar = llguidance.LLMatcher.grammar_from_lark(driver.submitted[0].params["structured_outputs"]["grammar"])
    tokenizer = llguidance.LLTokenizer("byte")
    for text, num_taken in (
        ('Well: <f=g>{"a": 1}</f>.', 24),
        ('<f=g>{"a":  1}', 11),
        ("Well: <f=h>", 9),
        ('<f=g>{"a": "b"}', 11),
        ("<g>", 3),
    ):
        assert llguidance.LLMatcher(tokenizer, grammar).try_consume_tokens(tokenizer.tokenize_str(text)) == num_taken
    assert refused.json()["error"]["param"] == "response_format.structures"
