"""Checks of JSON before it is parsed, and closed JSON schemas."""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.request_limits import MAX_DEPTH, MAX_VALUES

_ALL_ELSE = bytes(set(range(256)) - set(b'{}[]"'))


def check_json(json: bytes) -> None:
    """Raises ValueError for more than MAX_VALUES maps and lists, or MAX_DEPTH levels of them.

    Text that is no JSON may pass. It takes milliseconds for megabytes, and no recursion.
    """
    if json.count(b"[") + json.count(b"{") <= MAX_DEPTH:
        return
    unescaped = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(unescaped.translate(None, _ALL_ELSE), np.uint8)
    quotes = characters == ord('"')
    brackets = characters[~(quotes | np.logical_xor.accumulate(quotes))]  # outside of strings
    opened = (brackets == ord("[")) | (brackets == ord("{"))
    if (count := int(opened.sum())) > MAX_VALUES:
        raise ValueError(f"{count} maps and lists are too many: there may be {MAX_VALUES}")
    if np.where(opened, 1, -1).cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ValueError(f"it is nested too deeply: maps and lists may be {MAX_DEPTH} deep")


_SCHEMA = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords that hold schemas (JSON Schema 2020-12, sections 10 and 11, and older drafts)."""


def without_additional_properties(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever an object names properties."""
    return _changed(schema, _closed)


def without_idle_keywords(schema: Any) -> Any:
    """The schema without what llguidance takes none of and what forbids nothing: each ``propertyNames`` that allows any
    name, as zod writes one for every record, and as generators of OpenAPI do, each ``uniqueItems`` that is false,
    ``minProperties`` of 0, and an empty ``dependentRequired`` or ``dependentSchemas``."""
    return _changed(schema, _without_idle)


def with_references(schema: Any, moved: Callable[[str], str]) -> Any:
    """The schema with each ``$ref`` in it as ``moved`` has it."""

    def change(keywords: Keywords) -> Keywords:
        reference = keywords.get("$ref")
        return {**keywords, "$ref": moved(reference)} if isinstance(reference, str) else keywords

    return _changed(schema, change)


Keywords = dict[str, Any]
_IDLE = {"uniqueItems": False, "minProperties": 0, "dependentRequired": {}, "dependentSchemas": {}}
"""Keywords by the value with which they forbid nothing."""


def _closed(schema: Keywords) -> Keywords:
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _without_idle(schema: Keywords) -> Keywords:
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    for keyword, idle in _IDLE.items():
        if (type(schema.get(keyword)), schema.get(keyword)) == (type(idle), idle):
            del schema[keyword]
    return schema


def _changed(schema: Any, change: Callable[[Keywords], Keywords]) -> Any:
    """A copy in which it and all schemas within it are changed; of what is data, such as an ``enum``, nothing is."""
    if not isinstance(schema, dict):
        return schema
    return change({keyword: _inside(keyword, value, change) for keyword, value in schema.items()})


def _inside(keyword: str, value: Any, change: Callable[[Keywords], Keywords]) -> Any:
    if isinstance(value, list) and keyword in _LIST_OF_SCHEMAS:
        return [_changed(schema, change) for schema in value]
    if isinstance(value, dict) and keyword in _SCHEMAS_BY_NAME:
        return {name: _changed(schema, change) for name, schema in value.items()}
    return _changed(value, change) if keyword in _SCHEMA else value
