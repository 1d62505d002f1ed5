"""A field of a configuration that an operator may set: its default, and what a command line says about it."""

import dataclasses
from typing import Any


def setting(default: Any, metavar: str, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field. The flag, the variable and the key in the file follow from the field alone (ipc/service/settings.py).

    ``metavar`` stands for the value in a usage line, where it is no bool and there are no ``choices``; ``meaning`` says
    what a default of None is.
    """
    described = {"metavar": metavar, "meaning": meaning, "choices": choices}
    return dataclasses.field(default=default, metadata=described)
