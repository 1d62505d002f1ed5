"""How a setting of the operator's is declared, and what it may be."""

import dataclasses
from typing import Any

from engine.errors import ConfigurationError


def setting(default: Any, metavar: str, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field. Its flag, variable and file key derive from it (ipc/service/settings.py).

    ``metavar`` stands for the value in a usage line, unless it is a bool or has ``choices``.
    ``meaning`` says what a default of None is.
    """
    described = {"metavar": metavar, "meaning": meaning, "choices": choices}
    return dataclasses.field(default=default, metadata=described)


def check_choices(config: Any) -> None:
    """Raises ConfigurationError if a ``setting`` of the dataclass is none of its choices, nor its default."""
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices", ())
        known = not choices or value in (*choices, field.default)
        require_setting(known, field.name, f"one of {', '.join(choices)}", value)


def require_setting(holds: bool, name: str, allowed: str, given: object) -> None:
    """Raises ConfigurationError, with what the setting may be, unless it holds."""
    if not holds:
        raise ConfigurationError(f"{name} must be {allowed}, not {given}")
