"""The parameters of a request, checked."""

import difflib
from typing import Any

import msgspec

from driver.errors import InvalidRequest
from engine.sampling_params import SamplingParams


def sampling_params(params: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """The checked parameters, with the defaults of those that are left out.

    Raises InvalidRequest that names the wrong one.
    """
    names = SamplingParams.__struct_fields__
    for name in params:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise InvalidRequest(f"unknown parameter {name!r}: {hint}")
    try:
        return msgspec.convert(defaults | params, SamplingParams, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_in_plain_words(str(error))) from error


def _in_plain_words(message: str) -> str:
    """``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected int, got str``."""
    what, _, path = message.partition(" - at `")
    name = path.rstrip("`").replace("$.", "")
    if not path or what.startswith(name):  # one of our own, which names what it is about
        return what
    return f"{name}: {what[0].lower()}{what[1:]}".replace("`", "").replace("array", "list")
