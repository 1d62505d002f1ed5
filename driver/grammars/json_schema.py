"""JSON schemas as far as we touch them ourselves."""

from typing import Any

_SCHEMA = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose values hold schemas (JSON Schema 2020-12, sections 10 and 11, and what drafts before it called them)."""


def without_additional_properties(schema: Any) -> Any:
    """The schema, in which every object that names its properties has no others, unless it says otherwise."""
    if not isinstance(schema, dict):
        return schema
    closed = {keyword: _inside(keyword, value) for keyword, value in schema.items()}
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _inside(keyword: str, value: Any) -> Any:
    if isinstance(value, list) and keyword in _LIST_OF_SCHEMAS:
        return [without_additional_properties(schema) for schema in value]
    if isinstance(value, dict) and keyword in _SCHEMAS_BY_NAME:
        return {name: without_additional_properties(schema) for name, schema in value.items()}
    return without_additional_properties(value) if keyword in _SCHEMA else value
