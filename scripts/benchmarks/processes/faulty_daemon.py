"""`odriver serve` on a device that fails now and then, for the soak: a program for ``Daemon``.

Of so many steps one fails, in turns: the device refuses it, it fails with the cache in its hands, or what it
computes is not a number. Steps of the smallest bucket are spared, so that one can see what a request gives alone.
"""

import itertools
import sys
from typing import Any

from jax.errors import JaxRuntimeError

from engine import build
from engine.step.execution_manager import ExecutionManager
from engine.step.forward_programs import FORWARD
from ipc.commands.cli import main


def faulty_daemon(every: int) -> str:
    """The program: of ``every`` steps one fails."""
    return f"import sys; from scripts.benchmarks.processes.faulty_daemon import serve; sys.exit(serve({every}))"


class FaultyManager(ExecutionManager):
    """Its steps fail as above."""

    every: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spared = min(self.shapes.buckets)
        self._countdown = self.every
        self._faults = itertools.cycle(("refused", "taken", "not finite"))

    def executable(self, name: str, size: int) -> Any:
        """A step, or a fault instead of it, or of what it gave."""
        step = super().executable(name, size)
        self._countdown -= name == FORWARD and size > self._spared
        if self._countdown or name != FORWARD:
            return step
        self._countdown = self.every
        fault = next(self._faults)
        print(f"injecting a fault: {fault}", file=sys.stderr)

        def faulty(*arguments: Any) -> Any:
            if fault == "refused":
                raise JaxRuntimeError("INTERNAL: injected before the step")
            cache, slots, logits, *rest = step(*arguments)
            if fault == "taken":
                raise JaxRuntimeError("INTERNAL: injected after the step")
            return cache, slots, logits * float("nan"), *rest

        return faulty


def serve(every: int) -> int:
    """The command line's ``main``, with the engine built on the device that fails."""
    FaultyManager.every = every
    build.ExecutionManager = FaultyManager  # type: ignore[misc]
    return main()
