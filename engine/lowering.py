"""Traces functions to be compiled, one at a time, and compiles them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

_TURN = Lock()


def lower(function: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = ()) -> Lowered:
    """``jax.jit(function, donate_argnums=donate).lower(*arguments)``, on any thread.

    Functions that threads trace beside each other come out in ways that depend on who was first, and a later start
    would look for other entries of the compilation cache. Compiling, which takes longest, may go on beside it.
    """
    with _TURN, _compiling_for(arguments):
        return jax.jit(function, donate_argnums=donate).lower(*arguments)


@dataclass(frozen=True)
class Compilation:
    """A function as it was compiled."""

    function: str
    size: int
    """Tokens or rows."""
    seconds: float
    """That it took, without tracing."""
    compiled: Compiled


Hear = Callable[[Compilation], None]
"""Is told of each, on the thread that has compiled it."""


def compile_lowered(lowered: Lowered, function: str, size: int, hear: Hear) -> Compiled:
    """``lowered.compile()``; whoever wants to know of it hears."""
    begun = time.perf_counter()
    compiled = lowered.compile()
    hear(Compilation(function, size, time.perf_counter() - begun, compiled))
    return compiled


def hear_nothing(compilation: Compilation) -> None:
    """A Hear that has no use for it."""
    del compilation


def _compiling_for(arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Where arguments lie on a chip that is not there: Pallas asks what chip it lowers for, and would look at this machine."""
    first = jax.tree.leaves(arguments)[0]
    sharding = first.sharding if isinstance(first, jax.ShapeDtypeStruct | Array) else None
    device = next(iter(sharding.device_set)) if sharding is not None else None
    if sharding is None or device is None or device.platform == jax.default_backend():
        return nullcontext()
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh(np.array([device]), ("chip",))
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
