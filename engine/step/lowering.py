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
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled, Lowered

_TURN = Lock()

CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA:CPU hands reductions of 4,096 numbers and more, and what is around them, to YNNPACK, which adds up in another order
and has an exp of its own: a row's numbers would depend on how many rows there are beside it. XLA's own loops go row by row.

What they may do is to contract a product with the sum that follows, where both are in one loop, which depends on the number
of rows: a step has no such pair between its kernels."""


def lower(function: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = ()) -> Lowered:
    """``jax.jit(function, donate_argnums=donate).lower(*arguments)``, on any thread; on a CPU with CPU_OPTIONS.

    Functions that threads trace beside each other come out in ways that depend on who was first, and a later start
    would look for other entries of the compilation cache. Compiling, which takes longest, may go on beside it.
    """
    options = CPU_OPTIONS if _platform_of(arguments) == "cpu" else None
    with _TURN, _compiling_for(arguments):
        return jax.jit(function, donate_argnums=donate, compiler_options=options).lower(*arguments)


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
    sharding = _sharding_of(arguments)
    if sharding is None or _platform_of(arguments) == jax.default_backend():
        return nullcontext()
    device = next(iter(sharding.device_set))
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh(np.array([device]), ("chip",))
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _platform_of(arguments: tuple[Any, ...]) -> str:
    """What a function of them is compiled for."""
    sharding = _sharding_of(arguments)
    if sharding is None:
        return jax.default_backend()
    device: Any = next(iter(sharding.device_set))
    return str(device.platform)


def _sharding_of(arguments: tuple[Any, ...]) -> Sharding | None:
    """Where they lie, if that is said."""
    first = jax.tree.leaves(arguments)[0]
    return first.sharding if isinstance(first, jax.ShapeDtypeStruct | Array) else None
