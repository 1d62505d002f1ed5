"""Compilation of functions: traced one at a time, counted, and partly staged while serving."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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

from caching.cores import usable_cores

logger = logging.getLogger(__name__)

_TURN = threading.RLock()

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"
_count = 0
_of_thread = threading.local()
_identity: ContextVar[str] = ContextVar("identity", default="")

CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA:CPU gives reductions of 4,096 numbers and more, and what surrounds them, to YNNPACK, which
adds in another order and has its own exp: a row's numbers would depend on the row count. XLA's
own loops go row by row. They may still contract a product with the sum that follows in the same
loop, and the row count decides if it is the same. A step has no such pair between its kernels."""


def lower(function: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = ()) -> Lowered:
    """``jax.jit(function, donate_argnums=donate).lower(*arguments)``, on any thread.

    CPUs get CPU_OPTIONS. A lock serializes tracing: concurrent traces depend on their order, and a
    later start would miss the compilation cache. Compilation, which takes longest, needs no lock.
    """
    options = None
    if _platform_of(arguments) == "cpu":
        options, function = CPU_OPTIONS, _with_identity(function)
    with _TURN, _compiling_for(arguments):
        return jax.jit(function, donate_argnums=donate, compiler_options=options).lower(*arguments)


def _with_identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the identity of what stores it in its name, by which JAX's cache has it for no other.

    An executable that XLA:CPU has from that cache cannot be stored, and would be traced at each start.
    """
    identity = _identity.get()
    if not identity:
        return function

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = f"{getattr(function, '__name__', 'program')}_{identity}"
    return named


@dataclass(frozen=True)
class Program:
    """A function to be compiled for one size."""

    name: str
    size: int
    """Tokens or rows."""
    lower: Callable[[], Lowered]


@dataclass(frozen=True)
class Compilation:
    """A compiled function."""

    function: str
    size: int
    """Tokens or rows."""
    seconds: float
    """Compile time, without tracing."""
    compiled: Compiled
    is_new: bool
    """Whether it does not come from JAX's cache on disk."""


OnCompiled = Callable[[Compilation], None]
"""Called for each compilation, on the thread that compiled it."""


def compile_program(
    program: Program, check: Callable[[], None] = lambda: None, identity: str | None = None
) -> Compilation:
    """Trace and compile, on any thread. ``check`` is called before either, and may raise. ``identity`` is
    that of the StoredExecutables that are to have it."""
    with _TURN:
        check()
        token = _identity.set(identity or "")
        try:
            lowered = program.lower()
        finally:
            _identity.reset(token)
    check()
    begun, found = time.perf_counter(), _num_found()
    compiled = lowered.compile()
    return Compilation(program.name, program.size, time.perf_counter() - begun, compiled, is_new=_num_found() == found)


def scratch_bytes(compiled: Compiled) -> int:
    """A step's memory besides weights and pages; 0 if the compiler does not report it."""
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return 0
    return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001 - jax's name
    global _count
    _count += event == _COMPILED and not _is_apart()


def _is_apart() -> bool:
    return getattr(_of_thread, "apart", False)


def _count_found(event: str, **_: str | int) -> None:
    if event == _FOUND:
        _of_thread.found = _num_found() + 1


def _num_found() -> int:
    """Compilations of this thread that JAX's cache on disk had."""
    return getattr(_of_thread, "found", 0)


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_count_found)


def num_compilations() -> int:
    """Compilations since this module was imported, persistent cache hits included.

    Those under ``counted_apart`` are excluded.
    """
    return _count


@contextmanager
def counted_apart() -> Iterator[None]:
    """Exclude this thread's compilations from ``num_compilations``; the caller counts them."""
    outer = _is_apart()
    _of_thread.apart = True
    try:
        yield
    finally:
        _of_thread.apart = outer


class StagedCompilation:
    """Jobs that compile one function each. Workers run them in order after ``begin``.

    The thread that steps the engine owns this. It runs ``publish`` when a function is ready, and
    the error of a failed job is raised there by ``adopt``.
    """

    def __init__(self, jobs: Sequence[Callable[[], None]], publish: Callable[[], None]) -> None:
        self._num_done = 0
        self._num_left = len(jobs)
        self._jobs = jobs
        self._publish = publish
        self._ended: SimpleQueue[Future[None]] = SimpleQueue()
        # Half the cores: a CPU device needs the others for its steps, and tracing holds the GIL.
        self._pool = ThreadPoolExecutor(max(1, usable_cores() // 2), "staged compilation")

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {"staged_compilations": self._num_done, "staged_compilations_left": self._num_left}

    def begin(self, notify: Callable[[], None]) -> None:
        """Start the workers. One of them calls ``notify`` when it is time to ``adopt``."""
        for job in self._jobs:
            self._pool.submit(_run_apart, job).add_done_callback(partial(self._end, notify))

    def adopt(self) -> None:
        """Publish what has been compiled; raises the error of a failed job."""
        while not self._ended.empty():
            self._ended.get().result()
            self._num_done += 1
            self._num_left -= 1
            self._publish()
            if not self._num_left:
                logger.info("everything is compiled: the last %d functions while serving", self._num_done)

    def close(self) -> None:
        """Start no further job. Running jobs end by themselves and are ignored."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, notify: Callable[[], None], job: Future[None]) -> None:
        if not job.cancelled():
            self._ended.put(job)
            notify()


def _run_apart(job: Callable[[], None]) -> None:
    with counted_apart():
        job()


def _compiling_for(arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """A mesh context for an absent chip: Pallas would lower for this machine's instead."""
    sharding = _sharding_of(arguments)
    if sharding is None or _platform_of(arguments) == jax.default_backend():
        return nullcontext()
    device = next(iter(sharding.device_set))
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh(np.array([device]), ("chip",))
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _platform_of(arguments: tuple[Any, ...]) -> str:
    """The platform that a function of these arguments is compiled for."""
    sharding = _sharding_of(arguments)
    if sharding is None:
        return jax.default_backend()
    device: Any = next(iter(sharding.device_set))
    return str(device.platform)


def _sharding_of(arguments: tuple[Any, ...]) -> Sharding | None:
    """The sharding of the first argument; None if it has none."""
    first = jax.tree.leaves(arguments)[0]
    return first.sharding if isinstance(first, jax.ShapeDtypeStruct | Array) else None
