"""Calls whose arguments are literals of a language: Python's, or Gemma 4's own."""

import json
from typing import NamedTuple

import msgspec
import regex

from ipc.gateway.output.schema_types import kind_of, quoted

MAX_NESTING = 64
NAME = regex.compile(r"[A-Za-z_$@][\w.$@-]{0,127}")
"""A key that needs no quotes."""
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
_TOKEN = regex.compile(
    rf'\s*(?:(?P<gemma><\|"\|>(?s:.*?)<\|"\|>)'
    r"""|(?P<string>"(?:[^"\\]|\\(?s:.))*+"|'(?:[^'\\]|\\(?s:.))*+')"""
    rf"|(?P<number>{_NUMBER})(?![\w.-])|(?P<name>[\w.$@-]{{1,128}})|(?P<mark>[\[\](){{}},:=]))"
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = regex.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(?s:(.)))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
GEMMA_QUOTE = '<|"|>'
"""Around a string of Gemma's."""


class Call(NamedTuple):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


def python_calls(text: str) -> list[Call] | None:
    """``[f(a=1), g(b='x')]``, or the same without brackets in lines; None for anything else."""
    try:
        return _Literals(text).python_calls()
    except ValueError:
        return None


def gemma_calls(text: str) -> list[Call] | None:
    """``call:f{a:1,b:<|"|>x<|"|>}``; None for anything else."""
    try:
        return _Literals(text).gemma_calls()
    except ValueError:
        return None


def json_of_text(text: str, kinds: frozenset[str]) -> str:
    """A text as JSON if it is that, or Python's way to write it, of an allowed kind; else as a string."""
    word = text.strip()
    try:
        kind = kind_of(msgspec.json.decode(word))
    except (ValueError, RecursionError):
        try:
            word = _Literals(word).value()
            kind = kind_of(msgspec.json.decode(word))
        except (ValueError, RecursionError):
            return quoted(text)
    return word if kind in kinds and (kind != "string" or word.startswith('"')) else quoted(text)


class _Literals:
    """A parser of literals; each method reads one thing, and raises ValueError if it is another."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._place = 0

    def python_calls(self) -> list[Call]:
        bracketed = self._takes("[")
        calls = []
        while not self._takes("]" if bracketed else ""):
            calls.append(Call(self._function(), self._object("(", "=", ")")))
            if bracketed and not self._takes(","):
                self._mark("]")
                break
        self._mark("")
        return calls

    def gemma_calls(self) -> list[Call]:
        calls: list[Call] = []
        while not calls or self._takes(","):
            if self._next("name") != "call":
                raise ValueError("it is no call")
            self._mark(":")
            calls.append(Call(self._function(), self._object("{", ":", "}")))
        self._mark("")
        return calls

    def value(self) -> str:
        """One value, and nothing behind it."""
        found = self._value(MAX_NESTING)
        self._mark("")
        return found

    def _function(self) -> str:
        """The name of a function, which may look like a number."""
        return self._next("name", "number")

    def _object(self, opening: str, between: str, closing: str, depth: int = MAX_NESTING) -> str:
        self._mark(opening)
        pairs = []
        while not self._takes(closing):
            key = self._next("name", "string", "gemma")
            self._mark(between)
            pairs.append(f"{_key(key)}: {self._value(depth)}")
            if not self._takes(","):
                self._mark(closing)
                break
        return "{" + ", ".join(pairs) + "}"

    def _list(self, closing: str, depth: int) -> str:
        values = []
        while not self._takes(closing):
            values.append(self._value(depth))
            if not self._takes(","):
                self._mark(closing)
                break
        return "[" + ", ".join(values) + "]"

    def _value(self, depth: int) -> str:
        if not depth:
            raise ValueError(f"literals are nested more than {MAX_NESTING} deep")
        kind, text = self._tokens[self._place]
        if kind == "mark" and text == "{":
            return self._object("{", ":", "}", depth - 1)
        self._place += 1
        if kind == "mark" and text in ("[", "("):
            return self._list("]" if text == "[" else ")", depth - 1)
        if kind == "number":
            return text
        if kind == "name" and text in _WORDS:
            return _WORDS[text]
        if kind in ("string", "gemma"):
            return _key(text)
        raise ValueError(f"{text!r} is no literal")

    def _next(self, *kinds: str) -> str:
        kind, text = self._tokens[self._place]
        if kind not in kinds:
            raise ValueError(f"{text!r} is no {kinds[0]}")
        self._place += 1
        return text

    def _mark(self, mark: str) -> None:
        if not self._takes(mark):
            raise ValueError(f"it has no {mark!r}")

    def _takes(self, mark: str) -> bool:
        """Whether the next token is this mark, which is read then; "" is the end."""
        found = self._tokens[self._place] == ("mark", mark)
        self._place += found
        return found


def _tokens(text: str) -> list[tuple[str, str]]:
    """Kinds and texts of tokens, and the end at the end."""
    tokens, place, size = [], 0, len(text.rstrip())
    while place < size:
        found = _TOKEN.match(text, place)
        if found is None:
            raise ValueError(f"nothing begins with {text[place : place + 8]!r}")
        kind = str(found.lastgroup)
        tokens.append((kind, found[kind]))
        place = found.end()
    return [*tokens, ("mark", ""), ("mark", "")]


def _key(token: str) -> str:
    """A name or a string as a string of JSON."""
    if token.startswith(GEMMA_QUOTE):
        return quoted(token.removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE))
    if token[0] not in "\"'":
        return quoted(token)
    try:
        return quoted(json.loads(token, strict=False) if token[0] == '"' else _unescaped(token[1:-1]))
    except ValueError:  # an escape that only Python has
        return quoted(_unescaped(token[1:-1]))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _character(escape: "regex.Match[str]") -> str:
    for digits in escape.groups()[:3]:
        if digits is not None:
            return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else "\ufffd"
    return _ESCAPED.get(escape[4], escape[4] if escape[4] in "\\'\"/" else "\\" + escape[4])
