"""What parsers of answers hold and look at again is bounded, whatever a model is made to say."""

from collections.abc import Callable
from typing import Any

import pytest

from ipc.gateway.output import argument_readers, markers, tool_call_parser
from ipc.gateway.output.argument_readers import Braces
from ipc.gateway.output.harmony import HarmonyParser
from ipc.gateway.output.json_formats import HERMES, LLAMA3_JSON, MISTRAL
from ipc.gateway.output.markers import MAX_SPACE
from ipc.gateway.output.output_parser import OutputParser, whole_output
from ipc.gateway.output.reasoning import REASONING_FORMATS, THINK, ReasoningParser
from ipc.gateway.output.tool_call_parser import ToolCallParser
from ipc.gateway.output.tool_formats import GLM45, OLMO3, PYTHONIC, QWEN3_CODER

FUNCTIONS = {"f": {"properties": {"a": {"type": "array"}}}}
SPACE = " \n" * 4000
LITTLE = 64
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CODER_CALL = "<tool_call><function=f>"

STARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "at the start": (lambda: ToolCallParser(HERMES, FUNCTIONS), ""),
    "at the start of what may be a call": (lambda: ToolCallParser(LLAMA3_JSON, FUNCTIONS), ""),
    "after a word": (lambda: ToolCallParser(HERMES, FUNCTIONS), "x"),
    "after a mark": (lambda: ToolCallParser(HERMES, FUNCTIONS), "<tool_call>"),
    "after arguments": (lambda: ToolCallParser(HERMES, FUNCTIONS), '<tool_call>{"name": "f", "arguments": {}'),
    "after a call": (lambda: ToolCallParser(HERMES, FUNCTIONS), CALL),
    "after a call that may be followed": (lambda: ToolCallParser(LLAMA3_JSON, FUNCTIONS), CALL[11:-12]),
    "between values": (lambda: ToolCallParser(QWEN3_CODER, FUNCTIONS), CODER_CALL),
    "before a value": (lambda: ToolCallParser(GLM45, FUNCTIONS), "<tool_call>f<arg_key>a</arg_key>"),
    "before thoughts": (lambda: ReasoningParser(THINK, None), ""),
    "in thoughts": (lambda: ReasoningParser(THINK, True), ""),
    "in thoughts with calls": (lambda: ReasoningParser(REASONING_FORMATS["apertus"], True), ""),
    "after a thought with calls": (lambda: ReasoningParser(REASONING_FORMATS["apertus"], True), "x"),
    "after a thought": (lambda: ReasoningParser(THINK, True), "x"),
    "after thoughts": (lambda: ReasoningParser(THINK, True), "x</think>"),
    "before a reply": (lambda: ReasoningParser(REASONING_FORMATS["granite"], True), "x</think>"),
    "in a reply": (lambda: ReasoningParser(REASONING_FORMATS["granite"], True), "x</think><response>y"),
    "in a header": (lambda: HarmonyParser(FUNCTIONS, parallel=True, hides_reasoning=False), ""),
    "in the next header": (
        lambda: HarmonyParser(FUNCTIONS, parallel=True, hides_reasoning=False),
        "<|channel|>final<|message|>x<|end|>",
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_no_more_whitespace_is_held_than_may_be_dropped(start: str) -> None:
    """It would be looked at again with each token."""
    make, before = STARTS[start]
    parser = make()
    parser.feed(before)
    for place in range(0, len(SPACE), 100):
        parser.feed(SPACE[place : place + 100])
        assert len(parser._text) <= 2 * MAX_SPACE + 100


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("start", STARTS)
def test_much_whitespace_means_the_same_in_pieces(start: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a call, a mark, a word, and at the end: more than may be dropped, which here is little, and up to that."""
    monkeypatch.setattr(markers, "MAX_SPACE", LITTLE)
    make, before = STARTS[start]
    for behind in (
        "",
        "y",
        "y" + SPACE[: 8 * LITTLE],
        CALL,
        "<think>z</think>",
        "</think>z",
        "<response>z",
        "<|channel|>final<|message|>z",
    ):
        for space in (SPACE[: 8 * LITTLE], SPACE[: LITTLE + 1], SPACE[:LITTLE], " "):
            text = before + space + behind
            wrapped = [whole_output(make_answer(make), text, "stop")]
            parser = make_answer(make)
            wrapped.append(whole_output(Pieces(parser, size), text, "stop"))
            assert wrapped[0] == wrapped[1], (behind, len(space))


class Pieces:
    """A parser that is fed few characters at a time."""

    def __init__(self, parser: Any, size: int) -> None:
        self.parser, self.size = parser, size
        self.end, self.finish_reason = parser.end, parser.finish_reason

    def feed(self, text: str) -> list[Any]:
        pieces = [text[place : place + self.size] for place in range(0, len(text), self.size)]
        return [event for piece in pieces for event in self.parser.feed(piece)]


def make_answer(make: Callable[[], Any]) -> Any:
    """The parser of a whole answer around one of its parts."""
    part = make()
    if isinstance(part, ReasoningParser):
        return OutputParser(part, None, hides_reasoning=False)
    return OutputParser(None, part, hides_reasoning=False) if isinstance(part, ToolCallParser) else part


@pytest.mark.parametrize(
    ("row", "head", "tail"),
    [
        (HERMES, '<tool_call>{"type":', "}"),
        (MISTRAL, '[TOOL_CALLS]{"id":', "}"),
        (PYTHONIC, "<|python_start|>[f(", "]"),
        (OLMO3, "<function_calls>f(", "</function_calls>"),
    ],
)
def test_what_begins_like_calls_in_calls_is_read_once(
    monkeypatch: pytest.MonkeyPatch, row: Any, head: str, tail: str
) -> None:
    """It is content, and no character of it is looked at for each mark before it."""
    looked_at = 0

    class Counting(Braces):
        def end(self, text: str, start: int = 0) -> int:
            nonlocal looked_at
            found = super().end(text, start)
            looked_at += (len(text) if found < 0 else found) - start
            return found

    for module in (tool_call_parser, argument_readers):
        monkeypatch.setattr(module, "Braces", Counting)
    text = head * 500 + tail * 500
    output = whole_output(OutputParser(None, ToolCallParser(row, FUNCTIONS), hides_reasoning=False), text, "stop")
    assert (output.content, output.calls, output.finish_reason) == (text, [], "stop")
    assert looked_at <= 2 * len(text)


def test_a_long_value_is_looked_through_once() -> None:
    """One that is no string is held until it is complete."""

    seen = []

    class Searched(str):
        __slots__ = ()

        def find(self, *given: Any) -> int:
            seen.append(given[1])
            return str.find(self, *given)

    reader = argument_readers.TaggedArguments(QWEN3_CODER.tags, FUNCTIONS["f"])  # type: ignore[arg-type]
    reader.read("<parameter=a>")
    for size in (1000, 2000, 3000):
        assert reader.read(Searched("1" * size)) == ("", "1" * size, False)
    settled, rest, ended = reader.read(Searched("1" * 3000 + "</parameter></function>"))
    assert (settled, rest, ended) == (f'"{"1" * 3000}"}}', "", True)
    assert seen == [0, 988, 1988, 2988]
