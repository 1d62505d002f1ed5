"""Traces functions to be compiled, one at a time."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import jax
from jax.stages import Lowered

_TURN = Lock()


def lower(function: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = ()) -> Lowered:
    """``jax.jit(function, donate_argnums=donate).lower(*arguments)``, on any thread.

    Functions that threads trace beside each other come out in ways that depend on who was first, and a later start
    would look for other entries of the compilation cache. Compiling, which takes longest, may go on beside it.
    """
    with _TURN:
        return jax.jit(function, donate_argnums=donate).lower(*arguments)
