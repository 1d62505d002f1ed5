"""Types and checks of config.json's keys."""

from typing import Annotated, Any

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
