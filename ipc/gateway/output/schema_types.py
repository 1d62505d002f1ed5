"""What a function's schema says of a parameter, for formats that write each by itself, as text without quotes."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

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
    root = parameters or {}
    schemas = (_member(part, "properties", dict).get(name) for part in object_parts(root))
    return kinds_of(next((schema for schema in schemas if schema is not None), None), root)


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The kinds that the schema of a parameter allows, with what it refers to in ``root``; all if it names none."""
    return (_kinds(schema, root) & ALL) or ALL


def object_parts(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that all arguments keep to at once: a function's own, what it refers to, and each of its ``allOf``."""
    left: deque[Any] = deque([parameters])
    seen, looks = set[int](), 0
    while left and looks < MAX_LOOKS:
        looks += 1
        part = left.popleft()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            left += _member(part, "allOf", list)[:MAX_LOOKS]
            if isinstance(reference := part.get("$ref"), str):
                looks += reference.count("/")
                left.append(_definition(reference, parameters))


def properties_of(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema of each parameter by its name, and the names of those that must be given."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for part in object_parts(parameters):
        for name, schema in _member(part, "properties", dict).items():
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        required += [name for name in _member(part, "required", list) if isinstance(name, str)]
    return properties | {name: {} for name in required if name not in properties}, required


def listed_values(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The values of which a schema allows one; none where it may allow others than it lists."""
    values: list[Any] = []
    left, seen, looks = [schema], set[int](), 0
    while left and looks < MAX_LOOKS:
        looks += 1
        schema = left.pop()
        if not isinstance(schema, dict):
            return []
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(listed := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            values += listed
        elif isinstance(reference := schema.get("$ref"), str):
            looks += reference.count("/")
            left.append(_definition(reference, root))
        elif branches := _member(schema, "anyOf", list) or _member(schema, "oneOf", list):
            left += branches[:MAX_LOOKS]
        elif parts := _member(schema, "allOf", list):
            left.append(parts[0])
        elif schema.get("type") == "null":
            values.append(None)
        else:
            return []
    return [] if left else values


def _member(schema: Mapping[str, Any], keyword: str, kind: type) -> Any:
    """What a schema has there, if it is of that kind; else an empty one."""
    found = schema.get(keyword)
    return found if isinstance(found, kind) else kind()


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
        elif parts := _member(schema, "allOf", list):
            left.append(parts[0])
        else:
            return ALL
    return ALL if left or looks > MAX_LOOKS else frozenset(kinds)


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root if reference == "#" or reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def quoted(text: str) -> str:
    """A JSON string; a surrogate pair becomes its character, and half of one U+FFFD."""
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return msgspec.json.encode(whole).decode()
