"""Parsing one sample of an answer into reasoning, content and calls."""

from collections import defaultdict
from typing import NamedTuple, Protocol

from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning, joined
from ipc.gateway.output.reasoning import ReasoningParser
from ipc.gateway.output.tool_call_parser import ToolCallParser

PIECE = 4096
"""Characters of a whole sample that a parser is given at once: it may look through all it has for each thing it finds."""


class AnswerParser(Protocol):
    """Parses one sample of an answer, a piece of its text at a time."""

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text decides."""

    def end(self) -> list[OutputEvent]:
        """The rest, at the end of the text."""

    def finish_reason(self, reason: str) -> str:
        """The finish reason: an answer with calls that ended by itself has ``tool_calls``."""


class OutputParser:
    """Parses reasoning first, and calls in the content after it; without parsers all is content.

    With ``hides_reasoning`` the reasoning is dropped.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None, *, hides_reasoning: bool
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._hides_reasoning = hides_reasoning

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text decides."""
        events: list[OutputEvent] = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._called(events)

    def end(self) -> list[OutputEvent]:
        """The rest, at the end of the text."""
        rest = self._called([] if self._reasoning is None else self._reasoning.end())
        return rest if self._tool_calls is None else joined([*rest, *self._tool_calls.end()])

    def finish_reason(self, reason: str) -> str:
        """The finish reason: an answer with calls that ended by itself has ``tool_calls``."""
        called = self._tool_calls is not None and self._tool_calls.num_calls
        return "tool_calls" if called and reason == "stop" else reason

    def _called(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if self._hides_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._tool_calls is None:
            return joined(events)
        found: list[OutputEvent] = []
        for event in events:
            found += self._tool_calls.feed(event.text) if isinstance(event, Content) else [event]
        return joined(found)


class Output(NamedTuple):
    """A sample that has come as a whole; ``calls`` are names and arguments."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str


def whole_output(parser: AnswerParser, text: str, reason: str) -> Output:
    """All of a sample at once, by a parser that has read nothing yet."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index].append(event.text)
    calls = [event.name for event in events if isinstance(event, CallBegins)]
    return Output(
        "".join(event.text for event in events if isinstance(event, Content)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        [(name, "".join(arguments[index])) for index, name in enumerate(calls)],
        parser.finish_reason(reason),
    )
