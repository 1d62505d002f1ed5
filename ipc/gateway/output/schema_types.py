"""Which kinds of JSON a parameter's schema allows, for formats that write text without quotes."""

from collections.abc import Mapping
from typing import Any

import msgspec

KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
ALL = frozenset([*KINDS.values(), "null"])
MAX_LOOKS = 4096
"""Schemas and listed values that are looked at for one parameter; whatever needs more allows all kinds."""


def kind_of(value: Any) -> str:
    """The kind of a decoded value; all numbers are one."""
    return "null" if value is None else KINDS[type(value)]


def parameter_kinds(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The kinds that a function's parameters allow for the one of this name; all if it has none."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return (_kinds(schema, parameters or {}) & ALL) or ALL


def _kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Those of a schema. Each that it refers to is looked at once, as it may refer to itself."""
    kinds: set[str] = set()
    left, seen, looks = [schema], set(), 0
    while left and looks < MAX_LOOKS:
        looks += 1
        schema = left.pop()
        if not isinstance(schema, dict):
            return ALL
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(reference := schema.get("$ref"), str):
            looks += reference.count("/")
            left.append(_definition(reference, root))
        elif types := schema.get("type"):
            named = types if isinstance(types, list) else [types]
            looks += len(named)
            kinds.update("number" if name == "integer" else str(name) for name in named[:MAX_LOOKS])
        elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            looks += len(values)
            kinds.update(map(kind_of, values[:MAX_LOOKS]))
        elif isinstance(branches := schema.get("anyOf") or schema.get("oneOf"), list):
            left += branches[:MAX_LOOKS]
        else:
            return ALL
    return ALL if left or looks > MAX_LOOKS else frozenset(kinds)


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root if reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def quoted(text: str) -> str:
    """A JSON string; a surrogate pair becomes its character, and half of one U+FFFD."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return msgspec.json.encode(whole).decode()
