"""Splitting function calls from content in a text that comes in pieces."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import regex

from ipc.gateway.output.markers import before
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, joined
from ipc.gateway.output.tool_formats import ToolFormat

_FIRST_KEY = regex.compile(r'\s*(?:\[\s*)?\{\s*"(?:type|id|name|arguments|parameters|function)"\s*:')


class ToolCallParser:
    """Parses one answer into the same events however its text is cut into pieces.

    A call that names none of the functions in ``names``, or is no JSON object up to its arguments,
    is content, verbatim. From the opening brace of its arguments on it is a call, even if it is
    cut off; its arguments end with the matching brace, and are passed on verbatim. Without
    ``parallel`` only the first call counts. Whitespace around calls is dropped.
    """

    def __init__(self, row: ToolFormat, names: set[str], *, parallel: bool = True) -> None:
        self._row = row
        self._names = names
        self._parallel = parallel
        self._place = self._say
        self._text = ""
        """Text of undecided meaning."""
        self._held = ""
        """The text before it, which is content if no call follows."""
        self._braces = _Braces()
        self._num_scanned = 0
        """Characters scanned for the end of an object, each once."""
        self._in_object = False
        self._bare = row.bare
        """Whether a call could begin here without its marker."""
        self._said = False
        self.num_calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        """What more of the text settles."""
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
        text, marker = self._text, self._row.marker
        if self._bare and text.lstrip().startswith("{"):
            self._open("", text)
            return
        head, found, tail = text.partition(marker)
        if found:
            content = head.rstrip()
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
        self._said = True
        return Content(text)

    def _open(self, held: str, text: str) -> None:
        self._held, self._text = held, text
        self._braces, self._num_scanned = _Braces(), 0
        self._place = self._head

    def _head(self, at_end: bool) -> Iterator[OutputEvent]:
        """After a marker or at a brace: a call, content, or not yet known."""
        header = self._row.header.match(self._text, partial=True)
        if header is not None and not header.partial and header["name"] in self._names:
            yield from self._begin(header["name"])
            self._in_object = header["object"] is not None
            self._text = self._text[header.end() :]
            self._place = self._arguments
        elif header is None and _FIRST_KEY.match(self._text, partial=True):
            yield from self._whole_object(at_end)
        elif header is None or not header.partial or at_end:
            yield from self._no_call()

    def _whole_object(self, at_end: bool) -> Iterator[OutputEvent]:
        """A call whose fields are not in the header's order is parsed once it is complete."""
        end = self._braces.end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        call = None if end < 0 else _call_of(self._text[self._text.index("{") : end])
        if call is not None and call.name in self._names:
            yield from self._begin(call.name)
            yield from self._more_arguments(call.arguments)
            self._text = self._text[end:]
            self._close_call()
        elif at_end or end >= 0:
            yield from self._no_call()

    def _no_call(self) -> Iterator[OutputEvent]:
        self._bare = False
        self._place = self._say
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
        end = self._braces.end(self._text)
        taken = len(self._text) if end < 0 else end
        yield from self._more_arguments(self._text[:taken])
        self._text = self._text[taken:]
        if end >= 0 and self._in_object:
            self._place = self._rest
        elif end >= 0:
            self._close_call()

    def _rest(self, at_end: bool) -> Iterator[OutputEvent]:
        """The rest of a call's object after its arguments."""
        rest = self._text.lstrip()
        if rest.startswith(","):
            self._braces = _Braces(depth=1)
            self._place = self._skip
        elif rest or at_end:
            self._text = rest.removeprefix("}")
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
        rest = self._text.lstrip()
        closer = next((closer for closer in self._row.closers if rest.startswith(closer)), None)
        if closer is not None:
            self._text = rest[len(closer) :]
            self._place = self._say
        elif at_end or not any(closer.startswith(rest) for closer in self._row.closers):
            self._place = self._say
        return iter(())


class _Braces:
    """Finds the brace that closes the first, or the last of ``depth`` open ones."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int:
        """Where it is, in more of the text, and one; -1 if it is still to come."""
        for place in range(start, len(text)):
            character = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return place + 1
        return -1


class _Call(NamedTuple):
    name: str
    arguments: str


def _call_of(text: str) -> _Call | None:
    """A JSON object as a call: a name, and arguments as an object, as its text, or none."""
    given = _object_of(text)
    function = given.get("function") if given else None
    given = function if isinstance(function, dict) else given
    if given is None or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", given.get("parameters"))
    if isinstance(arguments, str):
        return None if _object_of(arguments) is None else _Call(given["name"], arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return _Call(given["name"], msgspec.json.encode(arguments or {}).decode())


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
