"""The signals of a daemon."""

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
