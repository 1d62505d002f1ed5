"""Calls as a model of a format writes them."""

import json
from typing import Any

from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.tool_formats import GEMMA4


def written(row: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """All calls of an answer, names and arguments."""
    texts = [row.call[0] + name + row.call[1] + _arguments(row, given) + row.call[2] for name, given in calls]
    return (row.between or "").join(texts).join(row.around)


def _arguments(row: ToolFormat, given: dict[str, Any]) -> str:
    if row.tags is not None:
        (start, middle), end = row.tags.key, "\n" * row.tags.newlines + row.tags.closing
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        return "".join(start + key + middle + text + end for key, text in texts.items())
    if row is GEMMA4:
        return _gemma(given)
    if row.calls is not None:
        return ", ".join(f"{key}={value!r}" for key, value in given.items())
    return json.dumps(given)


def _gemma(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma, value)) + "]"
        case str():
            return f'<|"|>{value}<|"|>'
    return json.dumps(value)
