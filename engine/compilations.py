"""Counts what XLA compiles in this process, so that "nothing compiles during service" can be read off."""

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001 - jax names it
    global _count
    _count += event == _COMPILED


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Compilations since this module was imported, those answered by the persistent cache included."""
    return _count
