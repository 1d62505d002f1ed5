"""Grammars of answers that call functions, in the model's own format."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from driver.grammars.notation import any_of
from driver.text.json_schema import with_references, without_idle_keywords
from ipc.gateway.output.argument_readers import Tags
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.call_literals import GEMMA_QUOTE, NAME, json_of_text
from ipc.gateway.output.lark import SPACED, json_of, literal, one_of, text_rule
from ipc.gateway.output.schema_types import allowed, object_parts, properties_of
from ipc.gateway.output.tool_formats import GEMMA4
from ipc.openai.chat_tools import Function
from ipc.openai.question import BodyError

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_ACROSS = (
    *("anyOf", "oneOf", "not", "if", "enum", "const", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that say of all parameters together what none of them is held to by itself."""
_SHARED = ("$defs", "definitions")
_ALL = "odriver:parameters"
"""The name of a function's whole schema among the definitions of a parameter that refers into it."""
_GEMMA_WORDS = {
    "boolean": '"true" | "false"',
    "null": '"null"',
    "number": "NUMBER",
    "array": "list",
    "object": "object",
}
_GEMMA_RULES = [
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    'value: string | NUMBER | "true" | "false" | "null" | list | object',
    'list: "[" (value ("," value)*)? "]"',
    'object: "{" (pair ("," pair)*)? "}"',
    r'pair: /[A-Za-z_]\w{0,127}/ ":" value',
]


def call_rules(
    row: ToolFormat,
    functions: Sequence[Function],
    token_ids: Mapping[str, int],
    *,
    parallel: bool,
    forced: bool,
    behind: str,
) -> Iterator[str]:
    """Rules in which ``calls`` is one call of these functions, or several if ``parallel``; each is made when it is
    taken, as all of them may be far larger than what they are made from.

    ``behind`` is the beginning of the calls that stands before ``calls`` already. Raises BodyError for a function that is
    ``strict``, or any if they are ``forced``, to whose schema the format cannot hold its calls.
    """

    def call(before: str) -> str:
        heads = (literal(before + function.name + row.call[1], token_ids) for function in functions)
        return one_of(f"{head} arguments_{number}" for number, head in enumerate(heads)) + f" {closing}"

    closing, last = literal(row.call[2], token_ids), literal(row.around[1], token_ids)
    several = parallel and row.between is not None
    more = f"({literal(row.between or '', token_ids)} call)*" if several else ""
    yield f"calls: {call((row.around[0] + row.call[0]).removeprefix(behind))} {more} {last}"
    if several:
        yield f"call: {call(row.call[0])}"
    for number, function in enumerate(functions):
        arguments = _Arguments(row, function, number, token_ids)
        if forced or function.strict:
            arguments.check()
        yield from arguments.rules()
    if row is GEMMA4:
        yield from [
            *_GEMMA_RULES,
            f"string: {literal(GEMMA_QUOTE, token_ids)} text",
            text_rule("text", GEMMA_QUOTE, token_ids),
        ]
    elif row.tags is not None:
        yield text_rule("text", _end(row.tags), token_ids)


def _end(tags: Tags) -> str:
    """What is written behind a value."""
    return "\n" * tags.newlines + tags.closing


class _Arguments:
    """The rules of a function's arguments, of which ``arguments_N`` is the first, in a format.

    JSON keeps to the whole schema. Where each parameter is written by itself, they come in the
    schema's order, the required ones always, each of its own schema as far as the notation goes.
    """

    def __init__(self, row: ToolFormat, function: Function, number: int, token_ids: Mapping[str, int]) -> None:
        self._row = row
        self._function = function
        self._number = number
        self._token_ids = token_ids
        given = without_idle_keywords(function.parameters)
        self._schema = _NOTHING if given is None else {"type": "object", **given}
        self._properties, self._required = properties_of(self._schema)
        self._is_json = row.tags is None and row.calls is None

    def check(self) -> None:
        """Raises BodyError for what parameters cannot be held to one by one."""
        if self._is_json:
            return
        across = {keyword for part in object_parts(self._schema) for keyword in _ACROSS if keyword in part}
        if across:
            why = f"{self._function.name} has {', '.join(sorted(across))} beside its properties"
            raise BodyError(f"tools: {why}, which calls in this model's format cannot be held to", "tools")

    def rules(self) -> Iterator[str]:
        """All of them."""
        name = f"arguments_{self._number}"
        if self._is_json:
            yield f"{name}: {json_of(self._schema, SPACED)}"
            return
        opening, closing = ("{", "}") if self._row is GEMMA4 else ("", "")
        yield f"{name}: {literal(opening, self._token_ids)} {name}_first_0 {literal(closing, self._token_ids)}"
        yield from self._sequence(name)

    def _sequence(self, name: str) -> Iterator[str]:
        """Each parameter or, unless it is required, none, and a comma between any two."""
        comma = "" if self._row.tags is not None else "," if self._row is GEMMA4 else ", "
        for place, (key, schema) in enumerate(self._properties.items()):
            yield f"{name}_{place}: {self._parameter(key, schema)}"
            for state, before in (("first", ""), ("more", literal(comma, self._token_ids))):
                given = f"{before} {name}_{place} {name}_more_{place + 1}"
                left_out = "" if key in self._required else f" | {name}_{state}_{place + 1}"
                yield f"{name}_{state}_{place}: {given}{left_out}"
        for state in ("first", "more"):
            yield f'{name}_{state}_{len(self._properties)}: ""'

    def _parameter(self, key: str, schema: Any) -> str:
        tags, ids = self._row.tags, self._token_ids
        if tags is not None:
            return f"{self._tag(tags, key)} {self._text(schema, _end(tags))}"
        if self._row is GEMMA4:
            return f"{literal(_gemma_key(key), ids)} {self._gemma_value(schema)}"
        name = key if NAME.fullmatch(key) else json.dumps(key, ensure_ascii=False)
        return f"{literal(name + '=', ids)} {self._json(schema)}"

    def _tag(self, tags: Tags, key: str) -> str:
        """What is written before a value; raises BodyError for a key that could not be read there."""
        tag = tags.key[0] + key + tags.key[1]
        read = tags.opening.fullmatch(tag.strip())
        if read is None or read["key"].strip() != key:
            why = f"{self._function.name} has a parameter {key!r}, which this model's format of calls cannot name"
            raise BodyError(f"tools: {why}: rename it", "tools")
        return literal(tag, self._token_ids)

    def _text(self, schema: Any, end: str) -> str:
        """A value between tags, and the end of it."""
        kinds, values = allowed(schema, self._schema)
        if "string" not in kinds:
            return f"{self._json(schema)} {literal(end, self._token_ids)}"
        words = [word for value in values or [] if (word := _word(value, kinds)) is not None]
        return f"{any_of(words)} {literal(end, self._token_ids)}" if words else "text"

    def _json(self, schema: Any) -> str:
        """JSON of a parameter's schema, with all that it refers to."""
        shared = {name: self._schema[name] for name in _SHARED if name in self._schema}
        given = {**shared, **schema} if isinstance(schema, dict) else shared
        moved = with_references(given, _moved)
        if moved != given:
            whole = {name: value for name, value in self._schema.items() if name not in _SHARED}
            moved["$defs"] = {**moved.get("$defs", {}), _ALL: with_references(whole, _moved)}
        return json_of(moved, SPACED)

    def _gemma_value(self, schema: Any) -> str:
        kinds, values = allowed(schema, self._schema)
        if kinds <= {"number", "boolean", "null"}:  # as JSON has them
            return self._json(schema)
        if not values:
            return one_of(_GEMMA_WORDS.get(kind, "string") for kind in sorted(kinds))
        quote = literal(GEMMA_QUOTE, self._token_ids)
        strings = [value for value in values if isinstance(value, str)]
        others = [literal(_gemma_text(value), self._token_ids) for value in values if not isinstance(value, str)]
        return one_of([f"{quote} {any_of(strings)} {quote}", *others] if strings else others)


def _gemma_text(value: Any) -> str:
    """A value in Gemma's notation."""
    match value:
        case dict():
            return "{" + ",".join(_gemma_key(key) + _gemma_text(each) for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma_text, value)) + "]"
        case str():
            return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    return json.dumps(value)


def _gemma_key(key: str) -> str:
    """A key, and what is between it and its value."""
    return f"{key if NAME.fullmatch(key) else _gemma_text(key)}:"


def _word(value: Any, kinds: frozenset[str]) -> str | None:
    """The text of a listed value between tags; None for one that would be read as another."""
    word = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kinds == {"string"}:
        return word
    return word if json.loads(json_of_text(word, kinds)) == value else None


def _moved(reference: str) -> str:
    """A reference into a function's schema, in that of a parameter."""
    stays = not reference.startswith("#") or reference.startswith(tuple(f"#/{name}/" for name in _SHARED))
    return reference if stays else f"#/$defs/{_ALL}{reference[1:]}"
