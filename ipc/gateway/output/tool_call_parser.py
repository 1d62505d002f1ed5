"""Splitting function calls from content in a text that comes in pieces."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import regex

from ipc.gateway.output.argument_readers import ArgumentsReader, Braces, EndMark, JsonArguments, TaggedArguments
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.call_literals import Call
from ipc.gateway.output.markers import before, behind_space, without_space
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, joined

_FIRST_KEY = regex.compile(
    r'\s*(?:\[\s*)?\{\s*"(?:type|id|tool_call_id|name|tool_name|arguments|parameters|function)"\s*:'
)


MAX_HEADER = 2048
"""Characters between a marker and the arguments of a call."""


class ToolCallParser:
    """Parses one answer into the same events however its text is cut into pieces.

    A call that names none of the ``functions``, which are the parameters by the name, or is not
    written in the format, is content, verbatim. From its arguments on it is a call, even if it is
    cut off; a JSON object ends with the matching brace, and is passed on verbatim. Without
    ``parallel`` only the first call counts. Whitespace around calls is dropped.
    """

    def __init__(
        self, row: ToolFormat, functions: Mapping[str, Mapping[str, Any] | None], *, parallel: bool = True
    ) -> None:
        self._row = row
        self._functions = functions
        self._parallel = parallel
        self._place = self._say
        self._text = ""
        """Text of undecided meaning."""
        self._held = ""
        """The text before it, which is content if no call follows."""
        self._braces: Braces | EndMark = Braces()
        self._reader: ArgumentsReader = JsonArguments()
        self._num_scanned = 0
        """Characters scanned for the end of an object or of calls, each once."""
        self._in_object = False
        self._bare = row.bare
        """Whether a call could begin here without its marker."""
        self._said = False
        self.num_calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text decides."""
        self._text += text
        return joined(self._read(at_end=False))

    def end(self) -> list[OutputEvent]:
        """The rest, at the end of the text."""
        return joined(self._read(at_end=True))

    def _read(self, *, at_end: bool) -> Iterator[OutputEvent]:
        place = None
        while place != self._place:  # until it waits for more
            place = self._place
            yield from place(at_end)

    def _say(self, at_end: bool) -> Iterator[OutputEvent]:
        """Content, up to where a call may begin."""
        text, marker, first = self._text, self._row.marker, self._row.first
        start = behind_space(text) if self._bare and first else None
        if start and (start.startswith(first) or (first.startswith(start) and not at_end)):
            if start.startswith(first):
                self._open("", text)
            return
        head, found, tail = text.partition(marker)
        if found:
            content = without_space(head)
            self._open(head[len(content) :] + marker, tail)
        else:
            content = text if at_end and not (self.num_calls and text.isspace()) else before(text, marker)
            self._text = text[len(content) :]
        if content:
            self._bare = False
            yield self._content(content)

    def _content(self, text: str) -> Content:
        if self.num_calls and not self._said:
            text = text.lstrip()
        self._said = self._said or bool(text)
        return Content(text)

    def _open(self, held: str, text: str) -> None:
        self._held, self._text = held, text
        self._braces, self._num_scanned = Braces(), 0
        self._place = self._head

    def _head(self, at_end: bool) -> Iterator[OutputEvent]:
        """After a marker or at a brace: a call, content, or not yet known."""
        header = self._row.header.match(self._text[: MAX_HEADER + 1], partial=True)
        if header is not None and not header.partial and header["name"] in self._functions:
            yield from self._called(header)
        elif header is None and self._row.has_objects and _FIRST_KEY.match(self._text[: MAX_HEADER + 1], partial=True):
            yield from self._whole_object(at_end)
        elif header is None or not header.partial or at_end or len(self._text) > MAX_HEADER:
            yield from self._no_call()

    def _called(self, header: "regex.Match[str]") -> Iterator[OutputEvent]:
        """A header with the name of a function."""
        tags, name = self._row.tags, header["name"]
        if self._row.calls is not None:
            row = self._row
            bracketed = row.last == "]"
            self._braces = Braces(braces="[]", quotes=row.quotes) if bracketed else EndMark((row.last,), row.quotes)
            self._place = self._whole_calls
            return
        yield from self._begin(name)
        self._in_object = bool(header.groupdict().get("object"))
        self._reader = JsonArguments() if tags is None else TaggedArguments(tags, self._functions[name])
        self._text = self._text[header.end() :]
        self._place = self._arguments

    def _whole_calls(self, at_end: bool) -> Iterator[OutputEvent]:
        """Calls that are parsed once they are complete."""
        last, read = self._row.last, self._row.calls
        assert read is not None
        end = self._braces.end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        if end < 0 and not at_end:
            return
        block = self._text if end < 0 else self._text[:end]
        calls = read(block if last == "]" else block.removesuffix(last))
        if not calls or any(call.name not in self._functions for call in calls):
            yield from self._no_call(len(block))
            return
        for call in calls:
            yield from self._begin(call.name)
            yield from self._more_arguments(call.arguments)
        self._text = self._text[len(block) :]
        self._close_call()

    def _whole_object(self, at_end: bool) -> Iterator[OutputEvent]:
        """A call whose fields are not in the header's order is parsed once it is complete."""
        end = self._braces.end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        call = None if end < 0 else _call_of(self._text[self._text.index("{") : end])
        if call is not None and call.name in self._functions:
            yield from self._begin(call.name)
            yield from self._more_arguments(call.arguments)
            self._text = self._text[end:]
            self._close_call()
        elif at_end or end >= 0:
            yield from self._no_call(len(self._text) if end < 0 else end)

    def _no_call(self, size: int = 0) -> Iterator[OutputEvent]:
        """What began like a call is content, with so many characters of it that were read: read
        once, so that the time for a text is in proportion to its length."""
        self._bare = False
        self._place = self._say
        self._held, self._text = self._held + self._text[:size], self._text[size:]
        if self._held:
            yield self._content(self._held)

    def _begin(self, name: str) -> Iterator[OutputEvent]:
        self.num_calls += 1
        if self._counts:
            yield CallBegins(self.num_calls - 1, name)

    def _more_arguments(self, text: str) -> Iterator[OutputEvent]:
        if self._counts:
            yield CallArguments(self.num_calls - 1, text)

    @property
    def _counts(self) -> bool:
        return self._parallel or self.num_calls == 1

    def _arguments(self, at_end: bool) -> Iterator[OutputEvent]:
        del at_end
        arguments, self._text, ended = self._reader.read(self._text)
        yield from self._more_arguments(arguments)
        if ended and self._in_object:
            self._place = self._rest
        elif ended:
            self._close_call()

    def _rest(self, at_end: bool) -> Iterator[OutputEvent]:
        """The rest of a call's object after its arguments."""
        self._text = self._text.lstrip()
        if self._text.startswith(","):
            self._braces = Braces(depth=1)
            self._place = self._skip
        elif self._text or at_end:
            self._text = self._text.removeprefix("}")
            self._close_call()
        return iter(())

    def _skip(self, at_end: bool) -> Iterator[OutputEvent]:
        del at_end
        end = self._braces.end(self._text)
        self._text = "" if end < 0 else self._text[end:]
        if end >= 0:
            self._close_call()
        return iter(())

    def _close_call(self) -> None:
        self._bare = True
        self._place = self._close

    def _close(self, at_end: bool) -> Iterator[OutputEvent]:
        closers, rest = self._row.closers, behind_space(self._text)
        while rest and (closer := next((closer for closer in closers if rest.startswith(closer)), None)):
            self._text = rest[len(closer) :]
            rest = behind_space(self._text)
        if at_end or rest is None or not any(closer.startswith(rest) for closer in closers):
            self._place = self._say
        return iter(())


def _call_of(text: str) -> Call | None:
    """A JSON object as a call: a name, and arguments as an object, as its text, or none."""
    given = _object_of(text)
    function = given.get("function") if given else None
    given = function if isinstance(function, dict) else given
    name = None if given is None else given.get("name", given.get("tool_name"))
    if given is None or not isinstance(name, str):
        return None
    arguments = given.get("arguments", given.get("parameters"))
    if isinstance(arguments, str):
        return None if _object_of(arguments) is None else Call(name, arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return Call(name, msgspec.json.encode(arguments or {}).decode())


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
