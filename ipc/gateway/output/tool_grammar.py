"""Grammars of answers that call functions, in the model's own format."""

from collections.abc import Mapping, Sequence
from typing import Any

from ipc.gateway.output.lark import SPACED, json_of, literal, one_of
from ipc.gateway.output.tool_formats import ToolFormat
from ipc.openai.chat_tools import Function

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def call_rules(
    row: ToolFormat, functions: Sequence[Function], token_ids: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Rules in which ``calls`` is one call of these functions, or several if ``parallel``."""
    first, last = (literal(text, token_ids) for text in row.around)
    more = f" ({literal(row.between, token_ids)} call)*" if parallel else ""
    heads = [literal(row.call[0] + function.name + row.call[1], token_ids) for function in functions]
    calls = one_of(f"{head} arguments_{number}" for number, head in enumerate(heads))
    return [
        f"calls: {first} call{more} {last}",
        f"call: {calls} {literal(row.call[2], token_ids)}",
        *(f"arguments_{number}: {json_of(_schema(function), SPACED)}" for number, function in enumerate(functions)),
    ]


def _schema(function: Function) -> dict[str, Any]:
    """The schema of its arguments, which are an object whatever its parameters are."""
    return _NOTHING if function.parameters is None else {"type": "object", **function.parameters}
