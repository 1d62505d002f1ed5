"""What a function's schema says of a parameter, for formats that write each by itself, as text without quotes."""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
ALL = frozenset([*KINDS.values(), "null"])
MAX_LOOKS = 8192
"""Schemas and listed values that are looked at for one parameter; whatever needs more allows anything."""
MAX_NESTING = 64
"""Schemas in one another, or that refer to one another; what is further in allows anything."""


class Allowed(NamedTuple):
    """The values that a schema allows: those of these kinds, and where it lists ``values`` these alone."""

    kinds: frozenset[str]
    values: list[Any] | None = None


ANYTHING, NOTHING = Allowed(ALL), Allowed(frozenset(), [])


def kind_of(value: Any) -> str:
    """The kind of a decoded value; all numbers are one."""
    return "null" if value is None else KINDS[type(value)]


def parameter_kinds(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The kinds that a function's parameters allow for the one of this name; all if it has none."""
    root = parameters or {}
    schemas = [part["properties"][name] for part in object_parts(root) if name in _member(part, "properties", dict)]
    return allowed({"allOf": schemas}, root).kinds


def allowed(schema: Any, root: Mapping[str, Any]) -> Allowed:
    """What the schema of a parameter allows, with what it refers to in ``root``."""
    walk = _Walk(root)
    found = walk.schema(schema, MAX_NESTING)
    if found is NOTHING or walk.num_looks > MAX_LOOKS:
        return ANYTHING
    kinds, values = found
    return Allowed(kinds, [value for value in values or [] if kind_of(value) in kinds] or None)


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


def _member(schema: Mapping[str, Any], keyword: str, kind: type) -> Any:
    """What a schema has there, if it is of that kind; else an empty one."""
    found = schema.get(keyword)
    return found if isinstance(found, kind) else kind()


class _Walk:
    """Looks at a schema, and at what it refers to in ``root``."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._found: dict[int, Allowed] = {}
        """By the schema's id."""
        self.num_looks = 0

    def schema(self, schema: Any, depth: int) -> Allowed:
        """What it allows; NOTHING more where it refers to itself."""
        self.num_looks += 1
        if not isinstance(schema, dict) or not depth or self.num_looks > MAX_LOOKS:
            return ANYTHING
        if id(schema) not in self._found:
            self._found[id(schema)] = NOTHING
            parts = list(self._keywords(schema, depth - 1))
            self._found[id(schema)] = reduce(self._both, parts) if parts else ANYTHING
        return self._found[id(schema)]

    def _keywords(self, schema: dict[str, Any], depth: int) -> Iterator[Allowed]:
        """What each keyword allows."""
        if isinstance(reference := schema.get("$ref"), str):
            self.num_looks += reference.count("/")
            yield self.schema(_definition(reference, self._root), depth)
        if types := schema.get("type"):
            named = types if isinstance(types, list) else [types]
            self.num_looks += len(named)
            kinds = ALL.intersection("number" if name == "integer" else str(name) for name in named[:MAX_LOOKS])
            yield Allowed(kinds or ALL, [None] if kinds == {"null"} else None)
        if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            self.num_looks += len(values)
            yield Allowed(frozenset(map(kind_of, values[:MAX_LOOKS])) or ALL, values or None)
        for part in _member(schema, "allOf", list)[:MAX_LOOKS]:
            yield self.schema(part, depth)
        for keyword in ("anyOf", "oneOf"):
            if branches := _member(schema, keyword, list):
                yield self._any_of([self.schema(branch, depth) for branch in branches[:MAX_LOOKS]])

    def _both(self, first: Allowed, second: Allowed) -> Allowed:
        """What both allow; what the first allows where they contradict each other."""
        if first is NOTHING or second is NOTHING:
            return second if first is NOTHING else first
        kinds, values = first.kinds & second.kinds or first.kinds, first.values or second.values
        if first.values and second.values:
            self.num_looks += len(first.values) + len(second.values)
            if self.num_looks > MAX_LOOKS:
                return ANYTHING
            others = set(map(_encoded, second.values))
            values = [value for value in first.values if _encoded(value) in others] or first.values
        return Allowed(kinds, values)

    def _any_of(self, branches: list[Allowed]) -> Allowed:
        if all(branch is NOTHING for branch in branches):
            return NOTHING
        kinds = frozenset[str]().union(*(branch.kinds for branch in branches))
        lists = [branch.values for branch in branches if branch.values is not None]
        self.num_looks += sum(map(len, lists))
        if len(lists) < len(branches) or self.num_looks > MAX_LOOKS:
            return Allowed(kinds)
        return Allowed(kinds, list(chain.from_iterable(lists)))


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


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
