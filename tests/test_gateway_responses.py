"""``/v1/responses`` as the ``openai`` client sees it, over a driver that says what it is told to."""

import asyncio
import codecs
import itertools
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from test_gateway_tools import ScriptedDriver, client_of
from tokenizer_files import TOOL_TEMPLATE

from driver.errors import Overloaded
from driver.request import ActiveRequest, Logprob, ReturnSample, Usage
from ipc.gateway.output.json_formats import HERMES
from ipc.gateway.output.output_events import Content
from ipc.gateway.output.output_parser import OutputParser
from ipc.gateway.output.reasoning import REASONING_FORMATS, ReasoningParser
from ipc.gateway.output.tool_call_parser import ToolCallParser
from ipc.gateway.responses_api.content_tokens import ContentTokens

TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, ScriptedDriver]]:
    """OpenAI's client of a gateway, and the driver behind it, which says what the last message says."""
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


def test_a_text_is_answered(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """In the shape that OpenAI's own types have; parameters of either world arrive."""
    answer = client.responses.create(
        model="parrot", instructions="Be brief.", input="It is.", max_output_tokens=9, extra_body={"top_k": 4}
    )

    assert (answer.output_text, answer.status) == ("It is.", "completed")
    assert type(answer).model_validate(answer.to_dict()) == answer
    assert answer.usage is not None and answer.usage.total_tokens == 10
    assert submitted[0].params == {"max_tokens": 9, "top_k": 4}
    assert submitted[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "It is."},
    ]


def test_thoughts_words_and_calls_are_items(client: openai.OpenAI) -> None:
    """In the order in which they came."""
    answer = client.responses.create(model="parrot", input=ANSWER, tools=TOOLS)

    thought, message, call = answer.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Hm."
    assert message.type == "message" and answer.output_text == "I add."
    assert call.type == "function_call" and (call.name, call.arguments) == ("add", '{"a": 1}')
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_whole_though_its_thoughts_cannot_be_counted(
    scripted: tuple[openai.OpenAI, ScriptedDriver], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Where the daemon refuses to, as one that is full does, their share of the text is told."""
    client, driver = scripted
    client.responses.create(model="parrot", input=ANSWER)  # by now the gateway knows how the model thinks

    def refuse(*_: Any) -> None:
        raise Overloaded("too many")

    monkeypatch.setattr(driver, "submit_tokenizer_request", refuse)

    answer: Any = client.responses.create(model="parrot", input=ANSWER, stream=stream)

    whole = list(answer)[-1].response if stream else answer
    assert (whole.status, whole.output_text.split("\n")[0]) == ("completed", "I add.")
    assert whole.usage.output_tokens == 9 and 0 <= whole.usage.output_tokens_details.reasoning_tokens <= 2


def test_a_stream_that_breaks_off_says_so_in_an_event_of_this_api(
    scripted: tuple[openai.OpenAI, ScriptedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a type and a number, as all others."""
    client, driver = scripted

    def fail(request: ActiveRequest) -> None:
        driver.open[request.request_id] = request
        driver.say(request, "so far", [1])
        driver.fail("the device is on fire")

    monkeypatch.setattr(driver, "submit_request", fail)

    *_, last = client.responses.create(model="parrot", input="x", stream=True)

    assert last.type == "error" and (last.code, last.message, last.param) == ("internal", "the device is on fire", None)
    assert last.sequence_number > 0 and type(last).model_validate(last.to_dict()) == last


def test_a_stream_tells_item_by_item(client: openai.OpenAI) -> None:
    """With OpenAI's events in OpenAI's order, numbered through, from which its client puts the answer together."""
    with client.responses.stream(model="parrot", input=ANSWER, tools=TOOLS) as stream:
        events = list(stream)
        whole = stream.get_final_response()

    names = [event.type.removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    assert [name for name, _ in itertools.groupby(names)] == [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in part),
        *(name.format("output_text") for name in part),
        *(name.format("function_call_arguments") for name in call),
        "completed",
    ]
    for number, event in enumerate(client.responses.create(model="parrot", input=ANSWER, tools=TOOLS, stream=True)):
        assert event.sequence_number == number and type(event).model_validate(event.to_dict()) == event
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "I add." and whole.usage is not None


def test_a_stream_can_be_read_by_many_tasks(client: openai.OpenAI) -> None:
    """With asyncio, too."""

    async def ask(client: openai.AsyncOpenAI, text: str) -> str:
        async with client.responses.stream(model="parrot", input=text) as stream:
            return (await stream.get_final_response()).output_text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none") as other:
            return await asyncio.gather(*(ask(other, f"number {number}") for number in range(4)))

    assert asyncio.run(ask_all()) == [f"number {number}" for number in range(4)]


def test_what_was_answered_is_the_next_input(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """Items that follow each other and are one turn's become one message of it."""
    answer = client.responses.create(model="parrot", input=ANSWER, tools=TOOLS)
    call = answer.output[-1]
    assert call.type == "function_call"
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        *answer.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]

    assert client.responses.create(model="parrot", input=turns, tools=TOOLS).output_text == "3"
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert submitted[-1].messages == [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I add.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    assert submitted[-1].tools == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": False}}
    ]


def test_what_is_said_behind_a_call_is_of_its_turn(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """The next message is the call's result, as chat templates want it. What was said after results is a turn of its
    own."""
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"}
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    said = [{"role": "assistant", "content": text} for text in ("I add.", " Wait.", "It is 3.", "Well.")]
    turns: Any = [said[0], call, said[1], result, said[2], said[3], {"role": "user", "content": "So?"}]

    client.responses.create(model="parrot", input=turns)

    messages = submitted[-1].messages or []
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "assistant", "user"]
    assert [message["content"] for message in messages] == ["I add. Wait.", "3", "It is 3.", "Well.", "So?"]
    assert [called["id"] for called in messages[0]["tool_calls"]] == ["c"]


SAID = [b"I ", b"a", b"dd\xc3", b"\xa9", b" ", b".\n"]
TOKENS = [
    *(b"<think>", b"\nI a", b"dd.\n", b"</thi", b"nk>", b"\n\n"),
    *SAID,
    *(b"<tool_call>", b'{"name": "add", ', b'"arguments": {', b'"a": "I add"}}', b"</tool_call>"),
]
LOGPROBS = [{number: Logprob(-0.5, 1, token.decode(errors="replace"), token)} for number, token in enumerate(TOKENS)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 99])
def test_log_probabilities_are_those_of_the_tokens_of_the_content(size: int) -> None:
    """However many tokens a piece has: of neither thoughts, calls nor the marks between."""
    thoughts, calls = ReasoningParser(REASONING_FORMATS["qwen3"], opened=None), ToolCallParser(HERMES, {"add": None})
    parser, content = OutputParser(thoughts, calls, hides_reasoning=False), ContentTokens()
    decoder = codecs.getincrementaldecoder("utf-8")()

    taken = []
    for first in range(0, len(TOKENS), size):
        content.add(LOGPROBS[first : first + size])
        for event in parser.feed(decoder.decode(b"".join(TOKENS[first : first + size]))):
            taken += content.take(event)

    assert [TOKENS[number] for token in taken for number in token] == SAID


@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_tokens_that_are_no_text_have_their_log_probabilities(size: int) -> None:
    """Bytes that do not begin a character, at either end and among others, are shown and so are of the content."""
    written = [b"\xb9", b"a", b"\xa0", b"\xbf", b"b\xf0", b"\x9f", b"c", b"\xe2\x82", b"\xac", b"\x80"]
    tokens = [{number: Logprob(-0.5, 1, "\ufffd", token)} for number, token in enumerate(written)]
    decoder, content, taken = codecs.getincrementaldecoder("utf-8")(errors="replace"), ContentTokens(), []

    for first in range(0, len(written), size):
        content.add(tokens[first : first + size])
        taken += content.take(Content(decoder.decode(b"".join(written[first : first + size]))))

    assert taken == tokens


def test_a_piece_may_have_thoughts_and_content(address: str) -> None:
    """As a client that reads slowly gets them; the content has its log-probabilities."""
    driver = FakeDriver()
    driver.tokenizer_info = {"chat_template": TOOL_TEMPLATE}
    with serving(address, driver):
        for client in client_of(address):
            driver.submit_request = lambda request: request.channel.put(  # type: ignore[method-assign]
                ReturnSample(
                    request_id=request.request_id,
                    text=b"".join(TOKENS).decode(),
                    token_ids=list(range(len(TOKENS))),
                    logprobs=LOGPROBS,
                    finish_reason="stop",
                    usage=Usage(1, len(TOKENS)),
                )
            )
            answer = client.responses.create(
                model="parrot", input="x", tools=TOOLS, include=["message.output_text.logprobs"]
            )

    (part,) = next(item for item in answer.output if item.type == "message").content
    assert part.type == "output_text" and part.text == "I add\xe9 ."
    assert [bytes(one.bytes) for one in part.logprobs or []] == SAID


class Sum(pydantic.BaseModel):
    """What is asked for in a form."""

    total: int


def test_a_form_can_be_asked_for(client: openai.OpenAI, submitted: list[ActiveRequest]) -> None:
    """As a schema, which the text then has; the client makes an object of it."""
    parsed = client.responses.parse(model="parrot", input='{"total": 3}', text_format=Sum).output_parsed

    assert parsed == Sum(total=3)
    assert '"total"' in submitted[0].params["structured_outputs"]["grammar"]


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    """Whole or streamed, and it says why."""
    answer = client.responses.create(model="parrot", input="so it...")
    with client.responses.stream(model="parrot", input="so it...") as stream:
        last = list(stream)[-1]

    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete" and last.response.output_text == "so it..."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 30, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]}, "input[0].content[0].type"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_object", "schema": {"type": "object"}}}}, "text.format.schema"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    client: openai.OpenAI, submitted: list[ActiveRequest], fields: Any, param: str
) -> None:
    """And the daemon never hears of it."""
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**({"model": "parrot", "input": "x"} | fields))

    assert (error.value.param, submitted) == (param, [])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [('{"maximum": 1' + "0" * 40 + "}", "too large"), ('{"not":' * 3000 + "{}" + "}" * 3000, "recursion depth|nested")],
)
@pytest.mark.parametrize("path", ["/responses", "/chat/completions"])
def test_what_no_message_can_bear_is_the_clients(client: openai.OpenAI, path: str, parameters: str, words: str) -> None:
    """JSON has numbers of any size, and any depth."""
    tool = f'{{"type": "function", "name": "f", "parameters": {parameters}}}'
    body = f'{{"input": "x", "tools": [{tool}]}}'
    if path == "/chat/completions":
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'

    answer = httpx.post(
        f"{client.base_url}{path.removeprefix('/')}",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=PATIENCE,
    )

    assert answer.status_code == 400 and re.search(words, answer.json()["error"]["message"])
