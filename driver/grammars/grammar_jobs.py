"""What a client asks of a text's form, as a grammar that llguidance can compile."""

import json
import re
from typing import Any

import msgspec

from driver.errors import InvalidRequest
from driver.grammars.grammar_protocol import GrammarJob
from driver.grammars.json_schema import without_additional_properties
from driver.text.json_form import check_json
from engine.request_limits import MAX_GRAMMAR_BYTES
from engine.structured_outputs import StructuredOutputsParams

_TEMPERATURE = re.compile(r"\[[^\[\]\"/]*\btemperature\s*=")


def grammar_job(params: StructuredOutputsParams, *, hide_eos: bool) -> GrammarJob:
    """The grammar; raises InvalidRequest for what is too large, no JSON, or would not be honoured."""
    kind, source = _kind_and_source(params)
    size = len(source.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(params, f"it has {size} bytes and may have at most {MAX_GRAMMAR_BYTES}")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise _refused(params, "it holds half a surrogate pair, which is no text") from error
    return GrammarJob(kind, source, _json_options(params) if kind == "json" else {}, hide_eos)


def _kind_and_source(params: StructuredOutputsParams) -> tuple[str, str]:
    if params.is_json:
        return "json", _schema(params)
    if params.choice is not None:
        return "lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
    if params.regex is not None:
        return "regex", params.regex
    assert params.grammar is not None
    if _TEMPERATURE.search(params.grammar):
        raise _refused(params, "a rule cannot have a temperature of its own here")
    return "lark", params.grammar


def _schema(params: StructuredOutputsParams) -> str:
    """As text, which llguidance takes in whatever nesting it has and refuses where that is too deep."""
    given: Any = {"type": "object"} if params.json is None else params.json
    try:
        if isinstance(given, str):
            check_json(given.encode())
        schema = msgspec.json.decode(given) if isinstance(given, str) else given
        if not isinstance(schema, dict | bool):
            raise _refused(params, f"a JSON schema is an object, not {type(schema).__name__}")
        if params.disable_additional_properties:
            schema = without_additional_properties(schema)
        return msgspec.json.encode(schema).decode()
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _refused(params, f"this is no JSON: {error}") from error
    except ValueError as error:
        raise _refused(params, str(error)) from error


def _json_options(params: StructuredOutputsParams) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


def _refused(params: StructuredOutputsParams, why: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{params.form}: {why}")
