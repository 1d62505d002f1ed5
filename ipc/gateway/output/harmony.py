"""The messages in which gpt-oss answers, OpenAI's harmony format, parsed from a text in pieces.

An answer continues ``<|start|>assistant``: a header with a channel, and a recipient where a
function is called, then ``<|message|>`` and the message up to ``<|end|>`` or ``<|call|>``. The
channel ``analysis`` is reasoning, ``final`` and a ``commentary`` to nobody are content.
"""

from collections.abc import Collection

import regex

from ipc.gateway.output.argument_readers import EndMark
from ipc.gateway.output.markers import partial
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning, joined

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""Marks behind a message; the last two begin the header of the next one, if an end is missing."""
_CHANNEL = regex.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = regex.compile(r"\bto=(?:functions\.)?([\w.-]{1,128})")
_HEADER = regex.compile(r"\s*(?:<\||to=)")
"""How headers begin; a text that begins otherwise is content."""
MAX_HEADER = 512


class HarmonyParser:
    """Parses one answer into the same events however its text is cut into pieces.

    A message to none of the functions in ``names`` is reasoning, as what is in the channel
    analysis, or content. Without ``parallel`` only the first call counts.
    """

    def __init__(self, names: Collection[str], *, parallel: bool, hides_reasoning: bool) -> None:
        self._names = names
        self._parallel = parallel
        self._hides_reasoning = hides_reasoning
        self._num_calls = 0
        self._told: set[str] = set()
        """The kinds of the messages before this one."""
        self._message: str | None = None
        """What the message is that is being read: analysis, call, content or skipped."""
        self._ends = EndMark(_ENDS)
        """The end of that message; a call's arguments are JSON."""
        self._text = ""
        """Text of undecided meaning."""

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text decides."""
        return self._read(text, at_end=False)

    def end(self) -> list[OutputEvent]:
        """The rest, at the end of the text."""
        return self._read("", at_end=True)

    def finish_reason(self, reason: str) -> str:
        """The finish reason: an answer with calls that ended by itself has ``tool_calls``."""
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _read(self, text: str, *, at_end: bool) -> list[OutputEvent]:
        self._text += text
        events: list[OutputEvent] = []
        waits = False
        while not waits:
            more, waits = self._header(at_end) if self._message is None else self._body(at_end)
            events += more
        return joined(events)

    def _header(self, at_end: bool) -> tuple[list[OutputEvent], bool]:
        """The events of a header, and whether it waits for more."""
        header, found, body = self._text.partition(MESSAGE)
        size = len(header) - (0 if found else partial(header, MESSAGE))
        too_long = size > MAX_HEADER
        if not header.strip() and not found and not too_long:
            return [], True
        may_go_on = too_long or not (found or at_end)
        if not _HEADER.match(header[:MAX_HEADER], partial=may_go_on):
            self._text = self._text.lstrip()
            return self._begin("content"), False
        if too_long:
            start, self._text = self._text[:MAX_HEADER], self._text[MAX_HEADER:]
            return [*self._begin("content"), Content(start)], False
        if not found:  # at the end, a header alone says nothing
            return [], True
        self._text = body
        return self._message_begins(header), False

    def _message_begins(self, header: str) -> list[OutputEvent]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._num_calls += 1
            counts = self._parallel or self._num_calls == 1
            self._message, self._ends = "call" if counts else "skipped", EndMark(_ENDS, '"')
            return [CallBegins(self._num_calls - 1, recipient[1])] if counts else []
        is_analysis = recipient is not None or (channel is not None and channel[1] == "analysis")
        return self._begin("analysis" if is_analysis else "content")

    def _begin(self, message: str) -> list[OutputEvent]:
        """An empty line between two messages of a kind."""
        self._message, self._ends = message, EndMark(_ENDS)
        again = message in self._told
        self._told.add(message)
        return self._said("\n\n") if again else []

    def _body(self, at_end: bool) -> tuple[list[OutputEvent], bool]:
        """The events of a message, and whether it waits for more."""
        found = self._ends.search(self._text, self._ends.num_undecided)
        if found is None:
            size = len(self._text) - (0 if at_end else self._ends.num_undecided)
            text, self._text = self._text[:size], self._text[size:]
            return self._said(text), True
        text = self._text[: found.start()]
        self._text = self._text[found.start() if found[0] in _ENDS[-2:] else found.end() :]
        events = self._said(text)
        self._message = None
        return events, False

    def _said(self, text: str) -> list[OutputEvent]:
        match self._message:
            case "call":
                return [CallArguments(self._num_calls - 1, text)]
            case "analysis":
                return [] if self._hides_reasoning else [Reasoning(text)]
            case "content":
                return [Content(text)]
        return []
