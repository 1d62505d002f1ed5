"""A chat's text told apart: what is thought, what is said, and which functions are called."""

import argparse

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.commands import gateway_command
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.json_formats import HERMES, HUNYUAN_A13B, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning, joined
from ipc.gateway.output.reasoning import REASONING_FORMATS, ReasoningParser, reasoning_format_of
from ipc.gateway.output.tool_call_parser import ToolCallParser
from ipc.gateway.output.tool_formats import TOOL_FORMATS, tool_format_of

NAMES = dict.fromkeys(("add", "get_weather"))
ROWS = {"hermes": HERMES, "llama3": LLAMA3_JSON, "mistral": MISTRAL}
ADD = '{"name": "add", "arguments": {"a": 1}}'
Told = list[object]


def told(events: list[OutputEvent]) -> Told:
    """Content and thoughts as they are, and a call as its name and its arguments."""
    found: Told = []
    for event in events:
        if isinstance(event, CallBegins):
            assert event.index == sum(isinstance(one, tuple) and one[0] != "thinks" for one in found)
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, arguments = found.pop()  # type: ignore[misc]
            found.append((name, arguments + event.text))
        else:
            found.append(("thinks", event.text) if isinstance(event, Reasoning) else event.text)
    return found


def calls_in(row: ToolFormat, text: str, *, parallel: bool = True) -> Told:
    """What one answer, which comes at once, is."""
    parser = ToolCallParser(row, NAMES, parallel=parallel)
    return told(joined([*parser.feed(text), *parser.end()]))


@pytest.mark.parametrize(
    ("row", "text", "expected"),
    [
        ("hermes", "Hello!", ["Hello!"]),
        ("hermes", "  Hello \n", ["  Hello \n"]),
        ("hermes", " \n", [" \n"]),
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", [("add", '{"a": 1}')]),
        ("hermes", f"\n\n<tool_call>{ADD}</tool_call>\n", [("add", '{"a": 1}')]),
        ("hermes", f"I add.\n<tool_call>{ADD}</tool_call>", ["I add.", ("add", '{"a": 1}')]),
        ("hermes", f"<tool_call>{ADD}</tool_call>\nThat was it.", [("add", '{"a": 1}'), "That was it."]),
        ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}", [("add", '{"a": 1}'), ("add", '{"a": 1}')]),
        ("hermes", f"<tool_call>{ADD}\n{ADD}</tool_call>", [("add", '{"a": 1}'), ("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a":1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}, "id": "}"}</tool_call>.', [("add", "{}"), "."]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "}\\"{"}}', [("add", '{"s": "}\\"{"}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": {"b": [', [("add", '{"a": {"b": [')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', [("add", '{"a": 1}')]),
        ("hermes", "Say <tool_call> to call.", ["Say <tool_call> to call."]),
        ("hermes", "a <tool_call>\n[1] </tool_call>", ["a <tool_call>\n[1] </tool_call>"]),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}', ['<tool_call>{"name": "rm", "arguments": {}}']),
        ("hermes", '<tool_call>{"name": "add", "argu', ['<tool_call>{"name": "add", "argu']),
        ("hermes", f"x <tool_call> <tool_call>{ADD}", ["x <tool_call>", ("add", '{"a": 1}')]),
        ("hermes", "1 < 2 <tool_", ["1 < 2 <tool_"]),
        ("hermes", ADD, [ADD]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
        ("llama3", '{"type": "function", "name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
        ("llama3", '{"function": {"name": "add", "parameters": {"a": 1}}}', [("add", '{"a":1}')]),
        ("llama3", f"<|python_tag|>{ADD}; {ADD}", [("add", '{"a": 1}'), ("add", '{"a": 1}')]),
        ("llama3", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        ("llama3", '{"answer": 42}', ['{"answer": 42}']),
        ("llama3", '{"name": "Ben", "age": 4}', ['{"name": "Ben", "age": 4}']),
        ("llama3", f"I call {ADD}", [f"I call {ADD}"]),
        ("mistral", f"[TOOL_CALLS][{ADD}, {ADD}]", [("add", '{"a": 1}'), ("add", '{"a": 1}')]),
        ("mistral", f"[TOOL_CALLS] [{ADD}]", [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{}[TOOL_CALLS]add{}', [("add", "{}"), ("add", "{}")]),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{}", ["[TOOL_CALLS]rm[ARGS]{}"]),
        ("mistral", "Well.[TOOL_CALLS][1]", ["Well.[TOOL_CALLS][1]"]),
    ],
)  # fmt: skip
def test_calls_are_told_from_what_is_said(row: str, text: str, expected: Told) -> None:
    """What is a call of a known function is one, in each format; all else is content, to the letter."""
    assert calls_in(ROWS[row], text) == expected


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<think>", "</think>", ADD, ADD[:-1]),
    *('{"name": "add", "parameters": {', '{"name": "', "add", '"', "}", "{", "[", "]", ",", ";", "\n", " ", "\\", "x"),
    *('"arguments": {"s": "<tool_call>"}', '{"arguments": {"a": 1}, "name": "get_weather"}', "{}", "<", "</", "Hi. "),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces; some may be empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=2 * settings.default.max_examples)
@given(text=TEXTS, places=st.lists(st.integers(0, 400), max_size=8), row=st.sampled_from(sorted(ROWS)))
def test_calls_do_not_depend_on_how_a_text_comes(text: str, places: list[int], row: str) -> None:
    """Any pieces of a text, a character at a time too, give what the whole gives."""
    whole = calls_in(ROWS[row], text)
    for pieces in (cut(text, places), list(text)):
        parser = ToolCallParser(ROWS[row], NAMES)
        events = [event for piece in pieces for event in parser.feed(piece)]

        assert told(joined([*events, *parser.end()])) == whole
        assert parser.num_calls == sum(isinstance(one, tuple) for one in whole)


@given(text=TEXTS, row=st.sampled_from(sorted(ROWS)))
def test_an_answer_without_calls_is_its_text(text: str, row: str) -> None:
    """Nothing is lost of a text that calls nothing."""
    found = calls_in(ROWS[row], text)

    assert any(isinstance(one, tuple) for one in found) or "".join(map(str, found)) == text


def test_what_is_settled_is_told_at_once() -> None:
    """Words before a call, its name, and its arguments as they grow; only what may be a marker waits."""
    parser = ToolCallParser(HERMES, NAMES)
    pieces = ["I add", " <tool", '_call>{"name": "add", ', '"arguments": {"a"', ": 1}", "}</tool_call>"]

    assert [parser.feed(piece) for piece in pieces] == [
        [Content("I add")],
        [],
        [],
        [CallBegins(0, "add"), CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1}")],
        [],
    ]


def test_one_call_may_be_all_that_counts() -> None:
    """Without parallel calls the first is the only one."""
    assert calls_in(MISTRAL, f"[TOOL_CALLS][{ADD}, {ADD}]", parallel=False) == [("add", '{"a": 1}')]


def thoughts_in(text: str, *, opened: bool | None, name: str = "qwen3", pieces: list[str] | None = None) -> Told:
    """What one answer is, in pieces or at once."""
    parser = ReasoningParser(REASONING_FORMATS[name], opened)
    events = [event for piece in pieces or [text] for event in parser.feed(piece)]
    return told(joined([*events, *parser.end()]))


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (None, "<think>\nHm.\nSo.\n</think>\n\nYes.", [("thinks", "Hm.\nSo."), "Yes."]),
        (None, "\n<think>Hm.</think>Yes.</think>", [("thinks", "Hm."), "Yes.</think>"]),
        (None, "<think>\n\n</think>\n\nYes. ", ["Yes. "]),
        (None, " Yes. <think>no</think>", [" Yes. <think>no</think>"]),
        (None, "<think>Hm", [("thinks", "Hm")]),
        (None, "<thin", ["<thin"]),
        (None, "", []),
        (True, "Hm.\n</think>\n\nYes.", [("thinks", "Hm."), "Yes."]),
        (True, "<think>\nHm.</think>Yes.", [("thinks", "Hm."), "Yes."]),
        (True, "Hm. </thin", [("thinks", "Hm. </thin")]),
        (False, "Yes. </think>", ["Yes. </think>"]),
        (False, "<think>", ["<think>"]),
    ],
)
def test_thinking_is_told_from_what_is_said(opened: bool | None, text: str, expected: Told) -> None:
    """Whether the model opens it or the prompt did, and not where the prompt has closed it."""
    assert thoughts_in(text, opened=opened) == expected


def test_some_models_think_without_a_word_of_it() -> None:
    """DeepSeek-R1's thinking may begin with the answer."""
    assert thoughts_in("Hm.</think>Yes.", opened=None, name="deepseek_r1") == [("thinks", "Hm."), "Yes."]


@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 400), max_size=8),
    opened=st.sampled_from([None, True, False]),
    name=st.sampled_from(sorted(REASONING_FORMATS)),
)
def test_thinking_does_not_depend_on_how_a_text_comes(
    text: str, places: list[int], opened: bool | None, name: str
) -> None:
    """Any pieces of a text give what the whole gives."""
    whole = thoughts_in(text, opened=opened, name=name)

    assert thoughts_in(text, opened=opened, name=name, pieces=cut(text, places)) == whole
    assert thoughts_in(text, opened=opened, name=name, pieces=list(text)) == whole


@pytest.mark.parametrize(
    ("template", "row"),
    [
        ("{{ '<tool_call> <function-name>' }}", HERMES),
        ("{{ '<tool_calls>[' }} <tool_call>", HUNYUAN_A13B),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' ~ '[ARGS]' }}", MISTRAL_ARGS),
        ('{{ \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}', LLAMA3_JSON),
        ("{{ messages }}", None),
    ],
)
def test_a_template_tells_its_format(template: str, row: ToolFormat | None) -> None:
    """Where what it has the model write is evident."""
    assert tool_format_of(template) == row
    assert tool_format_of(template, "hermes") == HERMES
    assert tool_format_of(template, "mistral") == (MISTRAL_ARGS if "[ARGS]" in template else MISTRAL)
    assert (reasoning_format_of(template + "<think></think>") is None) == (reasoning_format_of(template) is not None)


def test_every_format_can_be_said_on_the_command_line() -> None:
    """By its name, and nothing else."""
    parser = argparse.ArgumentParser()
    gateway_command.add_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}

    assert set(choices["tool_call_parser"]) == set(TOOL_FORMATS)
    assert set(choices["reasoning_parser"]) == set(REASONING_FORMATS)


@pytest.mark.parametrize("row", [HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS])
def test_what_a_format_writes_it_reads(row: ToolFormat) -> None:
    """Two calls in a row's own words are those two calls."""
    arguments = [msgspec.json.encode({"a": number}).decode() for number in (1, 2)]
    calls = [f"{row.call[0]}add{row.call[1]}{each}{row.call[2]}" for each in arguments]

    assert calls_in(row, row.between.join(calls).join(row.around)) == [("add", each) for each in arguments]
