"""Each family's way to write calls and reasoning, read whole and in pieces."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gateway_output import cut, told
from written_calls import written

from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.call_literals import GEMMA_QUOTE, gemma_calls, python_calls
from ipc.gateway.output.harmony import HarmonyParser
from ipc.gateway.output.json_formats import HARMONY
from ipc.gateway.output.output_events import joined
from ipc.gateway.output.output_parser import whole_output
from ipc.gateway.output.reasoning import REASONING_FORMATS, ReasoningParser
from ipc.gateway.output.schema_types import ANYTHING, Allowed, allowed, object_parts, parameter_kinds
from ipc.gateway.output.tool_call_parser import ToolCallParser
from ipc.gateway.output.tool_formats import GEMMA4, TOOL_FORMATS

ROWS = {f"{name}-{place}": row for name, rows in TOOL_FORMATS.items() for place, row in enumerate(rows)}
del ROWS["openai-0"]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "tags": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Unit"},
        "free": {},
    },
    "$defs": {"Unit": {"enum": ["C", "F", "5"]}},
}
FUNCTIONS = {"add": PARAMETERS, "now": None, "2.f-1": None, "7": None}
HARD = {
    "city": "Zürich \"<b>'\\n\"\n{it's} </par \\ 😀",
    "days": 3,
    "tags": ["a, b", "c]"],
    "unit": "5",
    "free": {"x": [1.5]},
}


def read(row: ToolFormat, text: str, pieces: list[str] | None = None, *, parallel: bool = True) -> list[Any]:
    """What an answer is, at once or in pieces: contents, and calls with their arguments decoded."""
    parser = ToolCallParser(row, FUNCTIONS, parallel=parallel)
    events = [event for piece in pieces or [text] for event in parser.feed(piece)]
    return told(joined([*events, *parser.end()]))


def decoded(found: list[Any]) -> list[Any]:
    """The same with arguments as objects."""
    return [each if isinstance(each, str) else (each[0], json.loads(each[1])) for each in found]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_a_format_writes_it_reads(row: ToolFormat) -> None:
    """One call, two, and one without arguments; also behind a text, but where calls must come first."""
    for calls in (
        [("add", HARD)],
        [("add", HARD), ("now", {})],
        [("now", {})],
        [("add", {"days": None}), ("add", HARD)],
        [("add", {"city": "".join(marks_of(row))}), ("now", {})],
    ):
        text = written(row, *calls)

        assert decoded(read(row, text)) == calls
        assert decoded(read(row, text + "\n", list(text + "\n"))) == calls
        assert read(row, text, parallel=False) == read(row, text)[:1]
        if row.around[0] + row.call[0] not in ("[", '{"name": "'):
            assert decoded(read(row, f"Well:\n{text}")) == ["Well:", *calls]


def texts_of(marks: Iterable[str]) -> st.SearchStrategy[str]:
    """Texts of marks, halves of them, and what is a mark to JSON and to Python."""
    halves = [half for mark in marks if mark.strip() for half in (mark, mark[: len(mark) // 2], mark[len(mark) // 2 :])]
    return st.lists(st.sampled_from(sorted({*halves, *"\"'\\\n{}[](),; x"})), max_size=6).map("".join)


def marks_of(row: ToolFormat) -> list[str]:
    """Those of a format that a string in a call may have: all but the one that ends it, where no escape is written."""
    marks = [row.marker, row.first, row.last, *row.closers, *row.tokens, *row.call, *row.around, "</think>"]
    return [mark for mark in marks if (end_of_string(row) or "none") not in mark]


def end_of_string(row: ToolFormat) -> str | None:
    """The mark that ends a string in a call, and cannot be in one."""
    return row.tags.closing if row.tags is not None else GEMMA_QUOTE if row is GEMMA4 else None


@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data(), name=st.sampled_from(sorted(ROWS)))
def test_a_string_in_a_call_may_have_any_marks(data: st.DataObject, name: str) -> None:
    """Whole, and at every cut of the text."""
    row, end = ROWS[name], end_of_string(ROWS[name])
    values = texts_of(marks_of(row)).filter(lambda text: end is None or (text + end).find(end) == len(text))
    calls = [("add", {"city": data.draw(values), "days": 3}), ("now", {})]
    text = written(row, *calls)

    assert decoded(read(row, text)) == calls
    assert decoded(read(row, text, list(text))) == calls
    for place in range(len(text)):
        assert decoded(read(row, text, [text[:place], text[place:]])) == calls


@given(value=texts_of((*HARMONY.tokens, "<|call|>", "<|return|>")))
def test_a_string_in_a_call_of_gpt_oss_may_have_any_marks(value: str) -> None:
    """Its message is JSON; what follows is read, too."""
    arguments = json.dumps({"a": value})
    text = f"{THINKS}{CALLS}{arguments}<|call|>{CALLS}{{}}<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    expected = [("thinks", "Hm."), ("add", arguments), ("add", "{}"), "Yes."]

    assert messages_in(text) == messages_in(text, list(text)) == expected
    start = text.index(arguments)
    for place in range(start, start + len(arguments) + len("<|call|>")):
        assert messages_in(text, [text[:place], text[place:]]) == expected


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_calls_no_function_is_content(row: ToolFormat) -> None:
    """A function that is not there, marks alone, and marks in the middle of words."""
    for text in (
        written(row, ("sub", {"a": 1})),
        f"<b> {row.marker} [1] {row.last}",
        "a[0](b) {c} <d",
        row.marker[:-1],
    ):
        assert "".join(read(row, text, list(text))) == text


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=add>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>"),
    *("days</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="add">', "</invoke>", "]"),
    *(
        '<parameter name="days">',
        "<seed:tool_call>",
        "</seed:tool_call>",
        "[add(",
        "days=3",
        ")",
        ", ",
        'city="]"',
        "x",
    ),
    *("<function_calls>", "</function_calls>", "<|tool_call>", "call:add{", 'city:<|"|>', '<|"|>', "}", "<tool_call|>"),
    *(
        "<|tool_call_begin|>functions.add:0",
        "<|tool_call_argument_begin|>",
        "{",
        "<|tool_call_end|>",
        "\n",
        "'",
        '"',
        " ",
    ),
    *(
        "<|START_ACTION|>",
        '[{"tool_name": "add", "parameters": {',
        "}}",
        "<",
        "</",
        "[",
        "add",
        "5",
        "\\",
        "🦊",
        "null",
    ),
    *(
        "<tool_sep>",
        "<tool_call:opensource>add<tool_sep:opensource>",
        "<tool_calls>",
        "</tool_calls>",
        "<|tools_prefix|>",
        '[{"add": {',
        "<|tools_suffix|>",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 400), max_size=6),
    row=st.sampled_from(sorted(ROWS)),
    begins=st.booleans(),
)
def test_calls_do_not_depend_on_how_a_text_comes(text: str, places: list[int], row: str, begins: bool) -> None:
    """Any pieces of a text give what the whole gives, and nothing is lost of one that calls nothing."""
    text = written(ROWS[row], ("add", HARD))[: len(text) * 8] + text if begins else text
    whole = read(ROWS[row], text)

    assert read(ROWS[row], text, cut(text, places)) == whole
    assert read(ROWS[row], text, list(text)) == whole
    assert any(isinstance(each, tuple) for each in whole) or "".join(whole) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen3_coder-0", "<function=add>\n<parameter=city>\n\na\n\n</parameter>\n</function>", [("add", {"city": "\na\n"})]),
        ("qwen3_coder-0", "<tool_call><function=add><parameter=city>5</parameter></function></tool_call>.", [("add", {"city": "5"}), "."]),
        ("qwen3_coder-0", "<tool_call><function=add><parameter=days>True</parameter></tool_call>", [("add", {"days": "True"})]),
        ("qwen3_coder-0", "<tool_call><function=add><parameter=free>[1, None]</parameter></function>", [("add", {"free": [1, None]})]),
        ("qwen3_coder-0", "<tool_call><function=add><parameter=new>{'a': False}</parameter></function>", [("add", {"new": {"a": False}})]),
        ("seed_oss-0", "<seed:tool_call><function=add><parameter=tags>['a', 'b']</parameter></function>", [("add", {"tags": ["a", "b"]})]),
        ("glm45-0", "<tool_call>add<arg_key>days</arg_key><arg_value>\n3 </arg_value></tool_call>", [("add", {"days": 3})]),
        ("glm45-0", "<tool_call>now</tool_call><tool_call>sub</tool_call>", [("now", {}), "<tool_call>sub</tool_call>"]),
        ("pythonic-0", "[add(days=-1.5e3, free={'a': (True, None)}, city='it\\'s \\u00fc'), now()]", [("add", {"days": -1500.0, "free": {"a": [True, None]}, "city": "it's ü"}), ("now", {})]),
        ("pythonic-0", "[add(city='\\ud83d\\ude00'), add(city=\"\\ud83d!\")]", [("add", {"city": "\U0001f600"}), ("add", {"city": "\ufffd!"})]),
        ("pythonic-0", "[add(1)]", ["[add(1)]"]),
        ("pythonic-0", "[now(), rm()]", ["[now(), rm()]"]),
        ("pythonic-0", "<|python_start|>[now()]<|python_end|> Done.", [("now", {}), "Done."]),
        ("lfm2-0", "<|tool_call_start|>[now(), add(free=[true, None])]<|tool_call_end|>Done.", [("now", {}), ("add", {"free": [True, None]}), "Done."]),
        ("lfm2-0", "[now()]", ["[now()]"]),
        ("olmo3-0", "<function_calls>now()\nadd(days=1)</function_calls>", [("now", {}), ("add", {"days": 1})]),
        ("gemma4-0", '<|tool_call>call:add{city:<|"|>a}"<|"|>,free:{x:[1,true]}}<tool_call|>', [("add", {"city": 'a}"', "free": {"x": [1, True]}})]),
        ("gemma4-0", "<|tool_call>call:now{}", [("now", {})]),
        ("gemma4-0", '<|tool_call>call:2.f-1{$a.b:1,<|"|>x y<|"|>:2}<tool_call|>', [("2.f-1", {"$a.b": 1, "x y": 2})]),
        ("pythonic-0", "[2.f-1(@a=1, 'x y'=-2), 7()]", [("2.f-1", {"@a": 1, "x y": -2}), ("7", {})]),
        ("olmo3-0", "<function_calls>add(city='\"</function_calls>\\'')</function_calls>.", [("add", {"city": "\"</function_calls>'"}), "."]),
        ("olmo3-0", "<function_calls>add(city='</func', days=1)</func</function_calls>.", ["<function_calls>add(city='</func', days=1)</func</function_calls>."]),
        ("deepseek_v31-0", "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>now<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c>", [("now", {})]),
        ("kimi_k2-0", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:12 <|tool_call_argument_begin|> {}<|tool_call_end|>", [("now", {})]),
        ("granite-0", '<|tool_call|>[{"arguments": {"days": 1}, "name": "add"}]', [("add", {"days": 1})]),
        ("hunyuan_a13b-0", 'Hm.\n<tool_calls>\n[{"name": "add", "arguments": {"days": 1}}, {"arguments": {}, "name": "now"}]\n</tool_calls>', ["Hm.", ("add", {"days": 1}), ("now", {})]),
        ("mimo-0", "<tool_call>\n<function=add>\n<parameter=city>\na\n</parameter>\n<parameter=days>3</parameter>\n</function>\n</tool_call>", [("add", {"city": "\na\n", "days": 3})]),
        ("hy_v3-0", "<tool_calls:opensource>\n<tool_call:opensource>now<tool_sep:opensource></tool_call:opensource>\n</tool_calls:opensource>", [("now", {})]),
        ("hy_v3-1", "<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>Done.", [("add", {"days": 3}), "Done."]),
        ("hy_v3-1", "<tool_calls><tool_call>now<tool_sep></tool_call><tool_call>sub<tool_sep></tool_call></tool_calls>", [("now", {}), "<tool_call>sub<tool_sep></tool_call></tool_calls>"]),
        ("hunyuan_a13b-0", "<tool_calls>[]</tool_calls>", ["<tool_calls>[]</tool_calls>"]),
        ("solar_open-0", '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>{"days": 1}<|tool_call:end|><|tool_call:begin|>f<|tool_call:name|>now<|tool_call:args|>{}', [("add", {"days": 1}), ("now", {})]),
        ("apertus-0", '<|tools_prefix|>[{"add": {"days": 1}}, {"now": {}}]<|tools_suffix|>Done.', [("add", {"days": 1}), ("now", {}), "Done."]),
        ("apertus-0", '<|tools_prefix|>[{"name": "add", "arguments": {"days": 1}}]<|tools_suffix|>', [("add", {"days": 1})]),
        ("apertus-0", '<|tools_prefix|>[{"sub": {"days": 1}}]<|tools_suffix|>', ['<|tools_prefix|>[{"sub": {"days": 1}}]<|tools_suffix|>']),
        ("cohere-0", '<|START_ACTION|>[{"tool_call_id": "0", "parameters": {}, "tool_name": "now"}]<|END_ACTION|>', [("now", {})]),
    ],
)  # fmt: skip
def test_ways_to_write_a_call(name: str, text: str, expected: list[Any]) -> None:
    """Newlines around a value, Python's words, and values of the kinds that the schema allows."""
    assert decoded(read(ROWS[name], text)) == expected
    assert read(ROWS[name], text, list(text)) == read(ROWS[name], text)


def test_a_long_value_comes_as_it_is_written() -> None:
    """A string is passed on before its end is there; what may be its end waits."""
    parser = ToolCallParser(ROWS["qwen3_coder-0"], FUNCTIONS)
    pieces = ["<tool_call><function=add><parameter=city>\n", 'a"', "\n</", "b\n</parameter", "></function>"]

    arguments = [[event.text for event in parser.feed(piece) if hasattr(event, "index") and hasattr(event, "text")] for piece in pieces]  # fmt: skip
    assert arguments == [['{"city": "'], ['a\\"'], [], ["\\n</b"], ['"}']]


def test_kinds_follow_the_schema() -> None:
    """References, alternatives and values; anything where it says nothing, and no endless circle."""
    circle = {
        "properties": {"a": {"$ref": "#/properties/a"}, "b": {"type": 5}, "c": {"const": 1}, "d": {"$ref": "#/x/y"}}
    }

    assert parameter_kinds(PARAMETERS, "unit") == {"string"} and parameter_kinds(PARAMETERS, "days") == {
        "number",
        "null",
    }
    assert parameter_kinds(PARAMETERS, "tags") == {"array", "null"} and len(parameter_kinds(PARAMETERS, "free")) == 6
    assert [len(parameter_kinds(circle, name)) for name in "abcde"] == [6, 6, 1, 6, 6]
    parts = {"$ref": "#/$defs/a~1b c", "$defs": {"a/b c": {"properties": {"e": {"allOf": [{"const": "5"}]}}}}}
    assert parameter_kinds(parts, "e") == {"string"}
    assert parameter_kinds({"allOf": [{"$ref": "#"}, parts["$defs"]["a/b c"]]}, "e") == {"string"}


def test_all_that_a_schema_says_counts() -> None:
    """Whatever the order of its keywords and parts; of what contradicts itself the first."""
    root = {"$defs": {"unit": {"enum": ["C", "F", 1]}, "list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}
    text, unit = {"type": "string"}, {"$ref": "#/$defs/unit"}

    for schema in ({"allOf": [text, unit]}, {"allOf": [unit, text]}, text | unit, {"allOf": [unit]} | text):
        assert allowed(schema, root) == Allowed(frozenset({"string"}), ["C", "F"])
    assert allowed({"allOf": [unit, {"enum": ["K", 1, "F"]}]}, root).values == ["F", 1]
    assert allowed({"anyOf": [text, {"$ref": "#/$defs/list"}], "allOf": [unit]}, root).values == ["C", "F"]
    assert allowed({"enum": [True, {"a": 1, "b": 2}], "allOf": [{"enum": [1, {"b": 2, "a": 1}]}]}, root).values == [
        {"a": 1, "b": 2}
    ]
    assert allowed({"type": "string", "enum": [1, 2]}, root) == Allowed(frozenset({"string"}))
    assert allowed({"enum": [], "anyOf": []}, root) == ANYTHING


def test_kinds_take_as_long_as_the_schema() -> None:
    """However often it refers to itself; of what is longer than anybody writes all kinds are taken."""
    tree = {"properties": {"p": {"anyOf": [{"$ref": "#/properties/p"}] * 2000 + [{"type": "string"}]}}}
    listed = {"properties": {"few": {"enum": ["x"] * 4000}, "many": {"enum": ["x"] * 9000}}}
    shared = {
        "$defs": {"a": {"enum": ["x"] * 4000}, "0": {}} | {str(1 + n): {"$ref": f"#/$defs/{n}"} for n in range(3000)}
    }

    assert parameter_kinds(tree, "p") == {"string"}
    assert allowed(tree["properties"]["p"], tree).values is None
    for keyword in ("anyOf", "allOf"):
        assert allowed({keyword: [{"$ref": "#/$defs/a", "title": str(n)} for n in range(3000)]}, shared) == ANYTHING
    assert allowed({"$ref": "#/$defs/3000"}, shared) == ANYTHING
    assert len(list(object_parts({"allOf": [{"$ref": "#"}] * 5000}))) < 5000
    assert [len(parameter_kinds(listed, name)) for name in listed["properties"]] == [1, 6]


def test_a_sample_with_many_messages_is_read_as_one_with_few() -> None:
    """A parser is given a whole sample piece by piece."""
    text = "<|channel|>final<|message|>ab<|end|><|start|>assistant" * 20_000

    output = whole_output(HarmonyParser({}, parallel=True, hides_reasoning=False), text, "stop")

    assert output.content == "\n\n".join(["ab"] * 20_000)


@pytest.mark.parametrize("text", ["", "[", "[f(a=1]", "f(a=b)", "f(a=01)", "f(a=1-2)", "f(a=-)", "f(a='x)", "[f()] g()", "f(" + "[" * 9999, "f(a=1 b=2)", "f(a=<|\"|>x)"])  # fmt: skip
def test_what_are_no_literals_are_no_calls(text: str) -> None:
    """However deep they are nested."""
    assert not python_calls(text) and gemma_calls(text) is None


def messages_in(text: str, pieces: list[str] | None = None, *, parallel: bool = True, hides: bool = False) -> list[Any]:
    """What an answer of gpt-oss is."""
    parser = HarmonyParser(FUNCTIONS, parallel=parallel, hides_reasoning=hides)
    events = [event for piece in pieces or [text] for event in parser.feed(piece)]
    return told(joined([*events, *parser.end()]))


THINKS = "<|channel|>analysis<|message|>Hm.<|end|>"
CALLS = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THINKS}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>", [("thinks", "Hm."), "Yes."]),
        (f'{THINKS}{CALLS}{{"a": 1}}<|call|>', [("thinks", "Hm."), ("add", '{"a": 1}')]),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', [("add", '{"a": 1}')]),
        (f"{CALLS.removeprefix('<|start|>assistant')}{{}}<|call|>{CALLS}{{}}", [("add", "{}"), ("add", "{}")]),
        ("<|channel|>commentary<|message|>I look.<|end|>" + CALLS + "{}", ["I look.", ("add", "{}")]),
        ("<|channel|>final<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B", ["A\n\nB"]),
        (f"{THINKS}<|start|>assistant{THINKS}", [("thinks", "Hm.\n\nHm.")]),
        ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", [("thinks", "{}")]),
        ("<|channel|>analysis<|message|>Hm <|e", [("thinks", "Hm <|e")]),
        ("<|channel|>final<|message|>a <|x|> < <|", ["a <|x|> < <|"]),
        ("No channels at all.", ["No channels at all."]),
        ("tomorrow", ["tomorrow"]),
        ("<|channel|>fin", []),
        ("<|channel|>" + "x" * 600 + "<|message|>y", ["<|channel|>" + "x" * 600 + "<|message|>y"]),
    ],
)
def test_messages_of_gpt_oss(text: str, expected: list[Any]) -> None:
    """Analysis is reasoning, what is sent to a function is a call, and the rest is content."""
    assert messages_in(text) == expected
    assert messages_in(text, list(text)) == expected


def test_of_gpt_oss_too_only_what_is_wanted_is_told() -> None:
    """One call, and no reasoning."""
    text = f"{THINKS}{CALLS}{{}}<|call|>{CALLS}[]<|call|>"

    assert messages_in(text, parallel=False, hides=True) == [("add", "{}")]


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|", "analysis", "final", "commentary", " to=functions.add"]  # fmt: skip


@given(text=st.lists(st.sampled_from([*MARKS, "x", "{}", " ", "<|constrain|>json", "assistant"]), max_size=14).map("".join),
       places=st.lists(st.integers(0, 300), max_size=6))  # fmt: skip
def test_messages_do_not_depend_on_how_a_text_comes(text: str, places: list[int]) -> None:
    """Any pieces of a text give what the whole gives."""
    assert messages_in(text, cut(text, places)) == messages_in(text) == messages_in(text, list(text))


@pytest.mark.parametrize(
    ("name", "opened", "text", "expected"),
    [
        ("cohere", None, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", [("thinks", "Hm."), "Yes."]),
        ("cohere", False, "<|START_RESPONSE|> Yes <|END_RESPONSE|>!", ["Yes!"]),
        ("cohere", True, "Hm.<|END_THINKING|>\n<|START_ACTION|>[", [("thinks", "Hm."), "<|START_ACTION|>["]),
        ("granite", None, "<think>Hm.</think>\n<response>\nYes.\n</response>", [("thinks", "Hm."), "Yes."]),
        ("granite", None, "<res", ["<res"]),
        ("ernie45", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", [("thinks", "Hm."), "Yes."]),
        ("ernie45", True, "Hm.\n</think>\n\n<tool_call>", [("thinks", "Hm."), "<tool_call>"]),
        ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", [("thinks", "Hm."), "Yes."]),
        ("hunyuan_a13b", False, "<answer>\nYes.\n</answer>", ["Yes."]),
        ("hunyuan_a13b", None, "Yes, <answer>.", ["Yes, <answer>."]),
        ("hy_v3", True, "Hm.</think:opensource>Yes.", [("thinks", "Hm."), "Yes."]),
        ("solar_open", None, "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant<|tool_calls|>", [("thinks", "Hm."), "Yes.<|tool_calls|>"]),
        ("solar_open", None, "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>", [("thinks", "Hm."), "<|tool_calls|>"]),
        ("solar_open", None, "<|content|>Yes.", ["Yes."]),
        ("apertus", None, "<|inner_prefix|>Hm. <|tools_prefix|>[]<|tools_suffix|>", [("thinks", "Hm."), "<|tools_prefix|>[]<|tools_suffix|>"]),
        ("apertus", None, "<|inner_prefix|> <|tools_ <|inner_suffix|>Yes. <|tools_prefix|>", [("thinks", "<|tools_"), "Yes. <|tools_prefix|>"]),
        ("apertus", None, "<|inner_prefix|>Hm. <|", [("thinks", "Hm. <|")]),
        ("apertus", None, "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", [("thinks", "Hm."), "Yes."]),
        ("gemma4", None, "<|channel>thought\nHm.\n<channel|>Yes.", [("thinks", "Hm."), "Yes."]),
        ("mistral", None, "[THINK]Hm.[/THINK]Yes.", [("thinks", "Hm."), "Yes."]),
        ("seed_oss", True, "Hm.</seed:think>Yes.", [("thinks", "Hm."), "Yes."]),
    ],
)  # fmt: skip
def test_reasoning_of_other_families(name: str, opened: bool | None, text: str, expected: list[Any]) -> None:
    """Marks around reasoning and around content are no part of either."""
    for pieces in ([text], list(text)):
        parser = ReasoningParser(REASONING_FORMATS[name], opened)
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert told(joined([*events, *parser.end()])) == expected


def test_what_never_becomes_a_call_is_let_go_in_time() -> None:
    """A header has a length, and of lists that nobody closes each character is read once."""
    far = "<tool_call>" + " " * 3000 + '{"name": "now", "arguments": {}}'
    unclosed = "<|python_start|>[now(" * 2000

    for row, text in ((ROWS["hermes-0"], far), (ROWS["pythonic-0"], unclosed)):
        assert "".join(read(row, text)) == "".join(read(row, text, cut(text, [1, 700, 2500, 9000]))) == text
