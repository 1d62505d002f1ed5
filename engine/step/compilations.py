"""Counts what XLA compiles in this process, so that "nothing compiles during service" can be read off."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"
_count = 0
_planned = threading.local()


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
