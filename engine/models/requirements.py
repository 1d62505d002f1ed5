"""Types and checks of config.json's keys."""

import re
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, get_args

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class UnsupportedError(Exception):
    """No decoder supports this; ``read_model_config`` adds the file's name."""


def require(holds: bool, message: str) -> None:
    """Raises UnsupportedError."""
    if not holds:
        raise UnsupportedError(message)


def require_one_of(key: str, value: object, supported: tuple[Any, ...]) -> None:
    """Raises UnsupportedError naming what is supported."""
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
    named = ", ".join(str(other) for other in supported if other is not None) or "none"
    require(value in supported, f"{key} {shown} is not supported; supported: {named}")


def require_expression(pattern: str, where: str) -> None:
    """Raises UnsupportedError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnsupportedError(f"{where}, which is no expression") from error


def without_nulls(given: Mapping[str, Any], fields: type[msgspec.Struct]) -> dict[str, Any]:
    """Without the nulls of keys that have none among their values: these have their default.

    A switch that is null is off, as Python's truth has it in the code of transformers.
    """
    types = {field.encode_name: field.type for field in msgspec.structs.fields(fields)}
    values = {key: False if value is None and types.get(key) is bool else value for key, value in given.items()}
    return {
        key: value
        for key, value in values.items()
        if value is not None or key not in types or NoneType in get_args(types[key])
    }
