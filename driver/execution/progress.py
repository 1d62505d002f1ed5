"""Since when the execution thread owes a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMMAND_PATIENCE = 600.0
"""Seconds that a command, such as to write a trace, may take before that is no progress."""


class Progress:
    """One thread writes it, and any may read ``seconds_since``; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made_at: float | None = None
        """When the last step ended or the work began; None without work, ahead in a command."""

    @property
    def seconds_since(self) -> float:
        """For how long there has been work without progress; 0 without work."""
        made_at = self._made_at
        return 0.0 if made_at is None else max(0.0, self._clock() - made_at)

    def made(self) -> None:
        """A step has ended, or there is work from now on."""
        self._made_at = self._clock()

    def not_owed(self) -> None:
        """There is no work."""
        self._made_at = None

    @contextmanager
    def running_no_step(self) -> Iterator[None]:
        """A block in which no step runs, which counts as progress for COMMAND_PATIENCE."""
        self._made_at = self._clock() + COMMAND_PATIENCE
        try:
            yield
        finally:
            self.made()
