"""Reading the arguments of a call, in a model's notation, as JSON while they come."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import regex

from ipc.gateway.output.call_literals import json_of_text
from ipc.gateway.output.markers import partial
from ipc.gateway.output.schema_types import parameter_kinds, quoted

MAX_OPENING = 1024
"""Characters between two values, a key among them."""


class Tags(NamedTuple):
    """Arguments as text between marks: ``opening`` matches what is before a value and names its
    ``key``, ``closing`` is behind it, and ``end`` behind the last one.

    ``newlines`` stand around a value and are none of it. To be written, a key is between the texts
    of ``key``.
    """

    opening: "regex.Pattern[str]"
    closing: str
    end: str
    key: tuple[str, str]
    newlines: bool = False


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> tuple[str, str, bool]:
        """The JSON that a text settles, the rest of the text, and whether the arguments ended."""


class JsonArguments:
    """Passes a JSON object on verbatim, up to the brace that closes the first one."""

    def __init__(self) -> None:
        self._braces = Braces()

    def read(self, text: str) -> tuple[str, str, bool]:
        """As ``ArgumentsReader`` says."""
        end = self._braces.end(text)
        return (text, "", False) if end < 0 else (text[:end], text[end:], True)


class TaggedArguments:
    """Makes an object of values between tags: strings as they come, others when they are complete.

    A value is of a kind that the function's ``parameters`` allow for its key. What is neither a
    value nor the end ends the arguments as well.
    """

    def __init__(self, tags: Tags, parameters: Mapping[str, Any] | None) -> None:
        self._tags = tags
        self._parameters = parameters
        self._kinds: frozenset[str] | None = None
        """Of the value that is being read."""
        self._is_string = False
        self._begun = False
        """Whether something of a string was read."""
        self._num_searched = 0
        """Characters of a value that is no string in which it does not end."""
        self._separator = "{"

    def read(self, text: str) -> tuple[str, str, bool]:
        """As ``ArgumentsReader`` says."""
        settled, ended, waits = "", False, False
        while not ended and not waits:
            step = self._between if self._kinds is None else self._value
            more, text, ended, waits = step(text)
            settled += more
        return settled, text, ended

    def _between(self, text: str) -> tuple[str, str, bool, bool]:
        """Between values: what it adds, the rest, whether it is the end, and whether it waits."""
        rest, end = text.lstrip(), self._tags.end
        opening = self._tags.opening.match(rest, partial=True)
        if opening is not None and not opening.partial:
            key, separator = opening["key"].strip(), self._separator
            self._kinds, self._separator, self._begun = parameter_kinds(self._parameters, key), ", ", False
            self._is_string = self._kinds == {"string"}
            start = '"' if self._is_string else ""
            return f"{separator}{quoted(key)}: {start}", rest[opening.end() :], False, False
        if (opening is not None and len(rest) <= MAX_OPENING) or (end.startswith(rest) and rest != end):
            return "", rest, False, True
        return "{}" if self._separator == "{" else "}", rest.removeprefix(end), True, False

    def _value(self, text: str) -> tuple[str, str, bool, bool]:
        closing = self._tags.closing
        place = text.find(closing, self._num_searched)
        if place < 0 and not self._is_string:
            self._num_searched = max(0, len(text) - len(closing))
            return "", text, False, True
        self._num_searched = 0
        if self._tags.newlines and not self._begun and text.startswith("\n"):
            text, place, self._begun = text[1:], place - 1, True
        self._begun = self._begun or bool(text)
        if place < 0:
            held = max(partial(text, closing), partial(text, "\n" + closing) if self._tags.newlines else 0)
            return quoted(text[: len(text) - held])[1:-1], text[len(text) - held :], False, True
        value, rest = text[:place], text[place + len(closing) :]
        value = value.removesuffix("\n") if self._tags.newlines else value
        json = quoted(value)[1:] if self._is_string else json_of_text(value, self._kinds or frozenset())
        self._kinds = None
        return json, rest, False, False


class _Strings:
    """Reads past strings in any of these ``quotes``, in a text that comes in pieces."""

    def __init__(self, quotes: Collection[str]) -> None:
        self._quotes = quotes
        self._string = ""
        """The quote of the string that it is in."""
        self._escaped = False

    def outside(self, text: str, start: int) -> Iterator[int]:
        """The places in more of the text that are in no string."""
        for place in range(start, len(text)):
            character = text[place]
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped = character == "\\"
                self._string = "" if character == self._string else self._string
            elif character in self._quotes:
                self._string = character
            else:
                yield place


class Braces:
    """Finds the brace that closes the first, or the last of ``depth`` open ones, outside of strings
    in any of these ``quotes``."""

    def __init__(self, depth: int = 0, braces: str = "{}", quotes: Collection[str] = '"') -> None:
        self._depth = depth
        self._braces = braces
        self._strings = _Strings(quotes)

    def end(self, text: str, start: int = 0) -> int:
        """Where it is, in more of the text, and one; -1 if it is still to come."""
        for place in self._strings.outside(text, start):
            if text[place] in self._braces:
                self._depth += 1 if text[place] == self._braces[0] else -1
                if self._depth == 0:
                    return place + 1
        return -1


class EndMark:
    """Finds the first of some marks outside of strings in any of these ``quotes``; in a string, those
    of one character are escaped by a backslash."""

    def __init__(self, marks: Collection[str], quotes: Collection[str] = ()) -> None:
        self._marks = marks
        self._quotes = quotes
        self._next = {"": _any_of(*marks, *quotes)}
        """What is looked for in a string of each quote, and in none."""
        for quote in quotes:
            self._next[quote] = regex.compile(rf"\\(?s:.)|{quote}") if len(quote) == 1 else _any_of(quote)
        self._string = ""
        """The quote of the string that it is in."""
        self.num_undecided = 0
        """Characters at the end of the text that may begin a mark, a quote or an escape."""

    def search(self, text: str, start: int = 0) -> "regex.Match[str] | None":
        """The mark, in a text that has more from ``start`` on; None if it is still to come."""
        place = start - self.num_undecided
        while found := self._next[self._string].search(text, place):
            if found[0] in self._marks and not self._string:
                return found
            place = found.end()
            if found[0] in self._quotes:
                self._string = "" if self._string else found[0]
        awaited = (self._string, "\\ ") if self._string else (*self._marks, *self._quotes)
        self.num_undecided = max(partial(text[place:], mark) for mark in awaited)
        return None

    def end(self, text: str, start: int = 0) -> int:
        """Where it ends, in a text that has more from ``start`` on; -1 if it is still to come."""
        found = self.search(text, start)
        return -1 if found is None else found.end()


def _any_of(*texts: str) -> "regex.Pattern[str]":
    return regex.compile("|".join(map(regex.escape, texts)))
