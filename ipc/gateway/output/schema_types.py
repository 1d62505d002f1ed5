"""Which kinds of JSON a parameter's schema allows, for formats that write text without quotes."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
ALL = frozenset([*KINDS.values(), "null"])
MAX_DEPTH = 8
"""References and alternatives that are followed, one inside the other."""


def kind_of(value: Any) -> str:
    """The kind of a decoded value; all numbers are one."""
    return "null" if value is None else KINDS[type(value)]


def parameter_kinds(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The kinds that a function's parameters allow for the one of this name; all if it has none."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return (frozenset(_kinds(schema, parameters or {}, MAX_DEPTH)) & ALL) or ALL


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not depth:
        yield from ALL
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _kinds(_definition(reference, root), root, depth - 1)
    elif types := schema.get("type"):
        named = types if isinstance(types, list) else [types]
        yield from ("number" if name == "integer" else str(name) for name in named)
    elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        yield from map(kind_of, values)
    elif isinstance(branches := schema.get("anyOf") or schema.get("oneOf"), list):
        for branch in branches:
            yield from _kinds(branch, root, depth - 1)
    else:
        yield from ALL


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root if reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def quoted(text: str) -> str:
    """A JSON string; half a surrogate pair becomes U+FFFD."""
    return msgspec.json.encode(text.encode(errors="surrogatepass").decode(errors="replace")).decode()
