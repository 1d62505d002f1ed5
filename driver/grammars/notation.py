"""What a client asks for, in the words of llguidance: Lark's notation, and JSON schemas."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from driver.text.json_schema import check_json, without_additional_properties, without_idle_keywords
from engine.structured_outputs import StructuredOutputsParams

_ESCAPED_OR_SLASH = re.compile(r"\\(?s:.)|[/\\]")

_TEMPERATURE = re.compile(
    r'"(?:[^"\\]|\\.)*+"?|(?://|#)[^\n]*|/(?:[^/\\]|\\.)*+/?|<[^<>\s]+>|(?P<attribute>\btemperature\s*=)', re.DOTALL
)
"""A string, a comment, a regex or a token in Lark's notation, or an attribute that gives a rule a temperature."""


def has_temperature(grammar: str) -> bool:
    """Whether a rule of a grammar in Lark's notation has a temperature; in linear time."""
    return any(found["attribute"] for found in _TEMPERATURE.finditer(grammar))


def string(text: str) -> str:
    """A Lark expression for this text; an empty one for none."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def pattern(regex: str) -> str:
    """A Lark expression for what matches a regex; raises ValueError for one that ends in an escape.

    A newline stands as it is, because it ends a comment of ``(?x)``.
    """
    return "/" + _ESCAPED_OR_SLASH.sub(_as_lark, regex) + "/"


def _as_lark(found: re.Match[str]) -> str:
    if found[0] == "\\":
        raise ValueError("it ends in a backslash, behind which there must be a character")
    return r"\/" if found[0] == "/" else found[0].replace("\n", "n")


def any_of(texts: Iterable[str]) -> str:
    """A Lark expression for one of these texts.

    It is one lexeme. As alternatives of a rule each text would be an item of its own in llguidance's
    parser, which has at most 2,000 of them behind a token.
    """
    return pattern(f"({'|'.join(map(re.escape, texts))})")  # a regex without a letter would be a comment


def schema_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """The JSON schema, which may be given as text. Raises ValueError for what is none, or too large."""
    given: Any = {"type": "object"} if params.json is None else params.json
    if isinstance(given, str):
        given = _decoded(given)
    if not isinstance(given, dict):
        raise ValueError(f"a JSON schema is an object, not {type(given).__name__}")
    schema: dict[str, Any] = without_idle_keywords(given)
    return without_additional_properties(schema) if params.disable_additional_properties else schema


WHITESPACE = r" |(\r?\n){1,2}[ \t]{0,64}"
"""Around JSON's punctuation, where a request does not say: a space, or the end of a line and what the next one is
indented by. A small model that may go on with whitespace often does, to the end of its tokens."""


def json_options(params: StructuredOutputsParams, schema: Mapping[str, Any]) -> dict[str, str | bool]:
    """What is asked for beside the schema, as llguidance's JsonCompileOptions; the schema may have some itself."""
    own = schema.get("x-guidance")
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    if isinstance(own, dict) and not own.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern")):
        return {}
    return {"whitespace_pattern": WHITESPACE}


def _decoded(schema: str) -> Any:
    try:
        encoded = schema.encode()
        check_json(encoded)
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"this is no JSON: {error}") from error
