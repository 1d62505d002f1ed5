"""Grammars in llguidance's Lark notation, put together from parts."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from driver.text.json_schema import without_additional_properties
from engine.structured_outputs import StructuredOutputsParams

SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it, and models that have read them."""
ANYTHING = "/(?s:.*)/"
SPACE = r"/\s*/"


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """This text; what is a token of its own stays that token, not its letters."""
    marks = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text) if marks else [text]
    return " ".join(_token_or_text(piece, token_ids) for piece in pieces if piece)


def _token_or_text(piece: str, token_ids: Mapping[str, int]) -> str:
    return f"<[{token_ids[piece]}]>" if piece in token_ids else json.dumps(piece, ensure_ascii=False)


def one_of(alternatives: Iterable[str]) -> str:
    """Any of these."""
    return "(" + " | ".join(alternatives) + ")"


def text_rule(name: str, end: str, token_ids: Mapping[str, int]) -> str:
    """A rule for any text up to the first such mark, and the mark."""
    if any(end.startswith(token) for token in token_ids):  # no text has a token of its own in it
        return f"{name}: {ANYTHING} {literal(end, token_ids)}"
    letters = re.sub(r"\W", lambda sign: f"\\x{{{ord(sign[0]):x}}}", end)
    return f"{name}[lazy]: /(?s:.*){letters}/"


def json_of(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """JSON of this schema, with llguidance's options for it."""
    return "%json " + json.dumps({**schema, "x-guidance": options})


def form_of(params: StructuredOutputsParams) -> str:
    """A Lark expression for a text of any form but a grammar; errors in it show at compilation."""
    if params.choice is not None:
        return one_of(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
    if params.regex is not None:
        return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", params.regex).replace("\n", r"\n") + "/"
    schema: Any = {"type": "object"} if params.json is None else params.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ValueError(f"structured_outputs.json: a JSON schema is an object, not {type(schema).__name__}")
    if params.disable_additional_properties:
        schema = without_additional_properties(schema)
    options: dict[str, Any] = {"whitespace_flexible": False} if params.disable_any_whitespace else {}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return json_of(schema, options)
