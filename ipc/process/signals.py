"""The signals of a daemon."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ipc.wire.bell import Bell


@contextmanager
def handling_signals(
    handle: Callable[[int, FrameType | None], None], bell: Bell, *, at_terminal: bool
) -> Iterator[None]:
    """Handle signals, which also ring the bell: Python's own waits may miss a signal that comes as
    they begin.

    At a terminal SIGHUP means that the terminal is gone, and has its default action.
    """
    wakeup = signal.set_wakeup_fd(bell.write_fd)
    numbers = (signal.SIGTERM, signal.SIGINT) if at_terminal else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)


@contextmanager
def postponing_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGINT when it is over, for imports: a handler that raises in the middle of a
    C++ module's aborts the process. The second one ends it at once."""
    came: list[int] = []

    def postpone(number: int, frame: FrameType | None) -> None:
        del frame
        if came:
            os._exit(128 + number)
        came.append(number)

    previous = {number: signal.signal(number, postpone) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for arrived in came:
            signal.raise_signal(arrived)
