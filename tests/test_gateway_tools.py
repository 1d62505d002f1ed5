"""Tools, forced tools and thinking through a gateway, as the ``openai`` client sees them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from fake_driver import FakeDriver, serving
from gateways import gateway
from test_structured_outputs import Served, write_model
from tokenizer_files import TOOL_TEMPLATE, build_byte_level, write_tokenizer
from tokenizers import AddedToken

from driver.request import ActiveRequest
from ipc.gateway.output.tool_formats import TOOL_FORMATS

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class ScriptedDriver(FakeDriver):
    """Says what the last message of a chat says, three characters at a time; has the chat template of its tokenizer."""

    def __init__(self, template: str = TOOL_TEMPLATE) -> None:
        super().__init__()
        self.tokenizer_info = {"chat_template": template}

    def submit_request(self, request: ActiveRequest) -> None:
        self.submitted.append(request)
        self.open[request.request_id] = request
        text = (request.messages or [])[-1]["content"]
        for start in range(0, len(text), 3):
            self.say(request, text[start : start + 3], [7])
        self.finish(request, "length" if text.endswith("...") else "stop", 9)


def client_of(address: str, **parsers: str | None) -> Iterator[openai.OpenAI]:
    """The client of a gateway to that address."""
    with gateway(address, **parsers) as http:
        url = f"{http.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, ScriptedDriver]]:
    """OpenAI's client of a gateway, and the driver behind it."""
    driver, address = ScriptedDriver(), f"ipc://{tmp_path_factory.mktemp('scripted')}/o.sock"
    with serving(address, driver):
        for client in client_of(address):
            yield client, driver


@pytest.fixture
def client(scripted: tuple[openai.OpenAI, ScriptedDriver]) -> openai.OpenAI:
    """The client; its driver has heard nothing yet."""
    scripted[1].submitted.clear()
    return scripted[0]


@pytest.fixture
def submitted(scripted: tuple[openai.OpenAI, ScriptedDriver]) -> list[ActiveRequest]:
    """What the driver hears."""
    return scripted[1].submitted


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    """The answer to a conversation whose last message says what is answered."""
    return client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": text}], **fields)


def test_calls_are_answered_as_calls(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """With ids, names, arguments and the finish reason tool_calls; the functions reach the chat template."""
    choice = ask(client, f"I add.\n{CALL}\n{CALL}", tools=TOOLS).choices[0]

    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "add", '{"a": 1, "b": 2}')
    ] * 2
    assert len({call.id for call in calls}) == 2 and not any(call.model_extra for call in calls)
    assert submitted[0].tools == TOOLS and "structured_outputs" not in submitted[0].params


def test_calls_are_streamed(client: openai.OpenAI) -> None:
    """The words before, then of each call its id and name, and then its arguments."""
    messages: Any = [{"role": "user", "content": f"Hm. {CALL}{CALL}"}]
    with client.chat.completions.stream(model="parrot", messages=messages, tools=TOOLS) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        whole = stream.get_final_completion().choices[0]

    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert [(delta.index, bool(delta.id), delta.function.name) for delta in deltas if delta.function.name] == [
        (0, True, "add"),
        (1, True, "add"),
    ]
    assert whole.message.content == "Hm." and whole.finish_reason == "tool_calls"
    assert [call.function.arguments for call in whole.message.tool_calls or []] == ['{"a": 1, "b": 2}'] * 2


def test_a_call_that_is_cut_off_is_what_there_is_of_it(client: openai.OpenAI) -> None:
    """With its finish reason."""
    choice = ask(client, f"{CALL[:50]}...", tools=TOOLS).choices[0]

    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1, ...'


def test_without_tools_a_call_is_text(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """And with the choice "none", with which the model does not hear of them either."""
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert ask(client, CALL, **fields).choices[0].message.content == CALL
    assert [request.tools for request in submitted] == [[], []]


def test_only_one_call_is_told_where_they_may_not_be_parallel(client: openai.OpenAI) -> None:
    """The first."""
    assert len(ask(client, CALL + CALL, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_an_answer_and_its_results_are_the_next_turns(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """What was answered goes back as it came."""
    answer = ask(client, f"<think>Hm.</think>{CALL}", tools=TOOLS).choices[0].message
    call = answer.tool_calls[0]
    turns: Any = [answer, {"role": "tool", "tool_call_id": call.id, "content": "3"}]

    assert client.chat.completions.create(model="parrot", messages=turns, tools=TOOLS).choices[0].message.content == "3"
    assert submitted[-1].messages == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_apart(client: openai.OpenAI, stream: bool) -> None:
    """As ``reasoning_content``, and as vLLM's ``reasoning``; unless nobody wants it."""
    text = "<think>\nIs it?\n</think>\n\nIt is."
    told: dict[str, str] = {"reasoning_content": "", "reasoning": "", "content": ""}
    answer = ask(client, text, stream=stream)
    for message in [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]:
        for name in told:
            told[name] += getattr(message, name, None) or ""

    assert told == {"reasoning_content": "Is it?", "reasoning": "Is it?", "content": "It is."}
    quiet = ask(client, text, extra_body={"include_reasoning": False}).choices[0].message
    assert quiet.content == "It is." and not hasattr(quiet, "reasoning")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_gpt_oss_are_reasoning_content_and_calls(address: str, stream: bool) -> None:
    """Which its template shows; the flag for its calls is one for its reasoning."""
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>"
    )
    for template, parser in (
        ("<|channel|>commentary <|channel|>analysis<|message|> tools", None),
        (TOOL_TEMPLATE, "openai"),
    ):
        with serving(address, ScriptedDriver(template)):
            for client in client_of(address, tool_call_parser=parser):
                answer = ask(client, text + 'json<|message|>{"a": 1}', tools=TOOLS, stream=stream)
                pieces = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]

                calls = [call.function for piece in pieces for call in piece.tool_calls or []]
                assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "Hm."
                assert calls[0].name == "add" and "".join(call.arguments for call in calls) == '{"a": 1}'
                assert not any(piece.content for piece in pieces)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(client: openai.OpenAI, fields: Any, param: str) -> None:
    """In OpenAI's shape."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "x", **fields)

    assert error.value.param == param


def test_a_model_that_calls_nobody_knows_how_takes_no_tools(address: str) -> None:
    """The error says what the operator can do."""
    with serving(address, ScriptedDriver("{{ messages }}")):
        for client in client_of(address):
            with pytest.raises(openai.BadRequestError, match="does not tell how it calls tools"):
                ask(client, "x", tools=TOOLS)


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SPECIAL_MARKS = ["[TOOL_CALLS]", "<|python_tag|>"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, int]]]:
    """The address of a model with random weights, whose tokenizer and template know tools, and ids of its marks."""
    tokenizer = build_byte_level()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL_MARKS])
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    served = Served(write_tokenizer(directory, tokenizer, TOOL_TEMPLATE))
    address = f"ipc://{directory}/o.sock"
    with serving(address, served.driver):
        yield address, {mark: tokenizer.token_to_id(mark) for mark in (*MARKS, *SPECIAL_MARKS)}
    served.driver.stop("the tests are done")


OTHERS = [name for name in TOOL_FORMATS if name not in ("hermes", "qwen3_coder", "openai")]


@pytest.fixture(
    scope="module",
    params=[
        *("hermes", "qwen3_coder"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS),
    ],
)
def model(request: pytest.FixtureRequest, served: tuple[str, dict[str, int]]) -> Iterator[openai.OpenAI]:
    """The client of a gateway to it that expects calls of one format."""
    yield from client_of(served[0], tool_call_parser=request.param)


NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_a_call_whatever_the_model_would_say(model: openai.OpenAI, stream: bool) -> None:
    """Of the named function, or of any where one is required, with arguments that the schema allows."""
    for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "add"}}] * 2):
        fields: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        if stream:
            messages: Any = [{"role": "user", "content": "the fox"}]
            with model.chat.completions.stream(
                model="parrot", messages=messages, **fields, extra_body=NOT_THINKING
            ) as got:
                answer = got.get_final_completion().choices[0]
        else:
            answer = ask(model, "the fox", **fields, extra_body=NOT_THINKING).choices[0]

        (call,) = answer.message.tool_calls or []
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        assert call.function.name in (["add", "now"] if choice == "required" else ["add"])
        jsonschema.validate(
            json.loads(call.function.arguments), ADD if call.function.name == "add" else {"maxProperties": 0}
        )


def test_a_strict_function_is_called_by_its_schema_or_not_at_all(served: tuple[str, dict[str, int]]) -> None:
    """The model may say what it likes, but for calls that the schema does not allow."""
    address, ids = served
    tools: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for client in client_of(address):
        text, call = (
            ask(
                client,
                "the fox",
                tools=tools,
                seed=1,
                max_tokens=60,
                parallel_tool_calls=False,
                logit_bias={str(ids["<tool_call>"]): bias},
                extra_body=NOT_THINKING,
            )
            .choices[0]
            .message
            for bias in (-100, 100)
        )

    assert text.content and not text.tool_calls
    jsonschema.validate(json.loads(call.tool_calls[0].function.arguments), ADD)


def test_a_form_is_that_of_what_comes_after_the_thoughts(served: tuple[str, dict[str, int]]) -> None:
    """A model that thinks does so freely before it keeps to a form, or calls what it must; also where the prompt has begun."""
    address, ids = served
    bias = {str(ids["<think>"]): 100, str(ids["</think>"]): 7}
    fields: Any = {"seed": 3, "max_tokens": 200, "logit_bias": bias}
    form = {"structured_outputs": {"regex": "[0-9]/[0-9]"}}
    switched = form | {"chat_template_kwargs": {"enable_thinking": True}}
    for client in client_of(address):
        digits = [ask(client, "the fox", extra_body=extra, **fields).choices[0].message for extra in (form, switched)]
        call = ask(client, "the fox", tools=TOOLS, tool_choice="required", **fields).choices[0].message

    assert all(digit.reasoning_content and re.fullmatch("[0-9]/[0-9]", digit.content) for digit in digits)
    assert call.reasoning_content and call.tool_calls[0].function.name in ("add", "now")
