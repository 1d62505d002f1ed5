"""How functions are compiled: traced one at a time, counted, and, what an engine can do without at first, while it serves."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled, Lowered

logger = logging.getLogger(__name__)

_TURN = threading.Lock()

_COMPILED = "/jax/core/compile/backend_compile_duration"
_count = 0
_planned = threading.local()

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
class Program:
    """A function to be compiled for one size."""

    name: str
    size: int
    """Tokens or rows."""
    lower: Callable[[], Lowered]


@dataclass(frozen=True)
class Compilation:
    """A function as it was compiled."""

    function: str
    size: int
    """Tokens or rows."""
    seconds: float
    """That it took, without tracing."""
    compiled: Compiled


OnCompiled = Callable[[Compilation], None]
"""Called with each, on the thread that has compiled it."""


def compile_program(program: Program) -> Compilation:
    """Trace and compile, on any thread."""
    lowered = program.lower()
    begun = time.perf_counter()
    compiled = lowered.compile()
    return Compilation(program.name, program.size, time.perf_counter() - begun, compiled)


def scratch_bytes(compiled: Compiled) -> int:
    """What a compiled step takes beside weights and pages while it runs; 0 where the compiler does not say."""
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return 0
    return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001 - jax names it
    global _count
    _count += event == _COMPILED and not hasattr(_planned, "apart")


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Compilations since this module was imported, those answered by the persistent cache included.

    Those made under ``counted_apart`` are not.
    """
    return _count


@contextmanager
def counted_apart() -> Iterator[None]:
    """What this thread compiles meanwhile was planned, and whoever planned it counts it."""
    _planned.apart = True
    try:
        yield
    finally:
        del _planned.apart


class StagedCompilation:
    """Jobs that compile a function each, done in order by workers once ``begin`` is called.

    The thread that steps the engine owns this. ``publish`` is called on it when there is something new to be used;
    what a worker raises comes out of ``adopt``, on it too.
    """

    def __init__(self, jobs: Sequence[Callable[[], None]], publish: Callable[[], None]) -> None:
        self.num_done = 0
        self.num_left = len(jobs)
        self._jobs = jobs
        self._publish = publish
        self._ended: SimpleQueue[Future[None]] = SimpleQueue()
        # Half the cores: where the device is a CPU, steps need the rest, and tracing holds the GIL.
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "staged compilation")

    def begin(self, notify: Callable[[], None]) -> None:
        """Start the workers; ``notify`` is called on one of them when it is time to ``adopt``."""
        for job in self._jobs:
            self._pool.submit(_run_apart, job).add_done_callback(partial(self._end, notify))

    def adopt(self) -> None:
        """Put to use what has been compiled; raises what went wrong with it."""
        while not self._ended.empty():
            self._ended.get().result()
            self.num_done += 1
            self.num_left -= 1
            self._publish()
            if not self.num_left:
                logger.info("everything is compiled: the last %d functions while serving", self.num_done)

    def close(self) -> None:
        """Begin no further job; those under way end by themselves, and to no effect."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, notify: Callable[[], None], job: Future[None]) -> None:
        if not job.cancelled():
            self._ended.put(job)
            notify()


def _run_apart(job: Callable[[], None]) -> None:
    with counted_apart():
        job()


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
