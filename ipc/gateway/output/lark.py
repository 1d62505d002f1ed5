"""Grammars in llguidance's Lark notation, put together from parts."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from driver.grammars.notation import any_of, json_options, pattern, schema_of, string
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
    return f"<[{token_ids[piece]}]>" if piece in token_ids else string(piece)


def one_of(alternatives: Iterable[str]) -> str:
    """Any of these."""
    return "(" + " | ".join(alternatives) + ")"


def text_rule(name: str, end: str, token_ids: Mapping[str, int]) -> str:
    """A rule for any text up to the first such mark, and the mark."""
    if any(end.startswith(token) for token in token_ids):  # no text has a token of its own in it
        return f"{name}: {ANYTHING} {literal(end, token_ids)}"
    return f"{name}[lazy]: /(?s:.*){letters_of(end)}/"


def letters_of(text: str) -> str:
    """An expression that matches this text alone."""
    return re.sub(r"\W", lambda sign: f"\\x{{{ord(sign[0]):x}}}", text)


def json_of(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """JSON of this schema, with llguidance's options for it beside those that it has itself."""
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):  # anything else is an error that shows at compilation
        schema = {**schema, "x-guidance": {**own, **options}}
    return "%json " + json.dumps(schema)


def form_of(params: StructuredOutputsParams) -> str:
    """A Lark expression for a text of any form. Raises ValueError; more errors show at compilation."""
    try:
        if params.grammar is not None:
            return f"%lark {{\n{params.grammar}\n}}"
        if params.choice is not None:
            return any_of(params.choice)
        if params.regex is not None:
            return pattern(params.regex)
        schema = schema_of(params)
        return json_of(schema, json_options(params, schema))
    except ValueError as error:
        raise ValueError(f"structured_outputs.{params.form}: {error}") from error
