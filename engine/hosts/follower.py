"""What a process other than 0 does: as it is told, to its own devices."""

from collections import deque
from collections.abc import Callable

import numpy as np

from engine.errors import HostsError
from engine.step.commands import AllocateCache, Command, DropCache, Landed, Leave, StepDescription
from engine.step.executor import ExecutedStep, StepExecutor


def execute_commands(executor: StepExecutor, hear: Callable[[], Command]) -> None:
    """Do what is heard, one after the other, until that is to leave. Raises HostsError where a step gave something else than at process 0."""
    in_flight: deque[ExecutedStep] = deque()
    landed = 0
    while not isinstance(command := hear(), Leave):
        match command:
            case StepDescription():
                in_flight.append(executor.execute(command))
            case Landed(token_ids=theirs):
                check_alike(landed, np.asarray(in_flight.popleft().token_ids), theirs)
                landed += 1
            case DropCache():
                executor.drop_cache()
            case AllocateCache():
                executor.allocate_cache()


def check_alike(step: int, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises HostsError, which says where the tokens of a step differ.

    All hosts run the same program over the same batch, and draw from sums that each device has from all: their tokens are
    equal whatever the rounding, unlike those of one request in two batches.
    """
    if not np.array_equal(ours, theirs):
        row = int(np.flatnonzero(ours != theirs)[0])
        raise HostsError(
            f"step {step} gave token {ours[row]} in row {row} here and {theirs[row]} at process 0: do both have the same "
            "weights, jax and devices?"
        )
