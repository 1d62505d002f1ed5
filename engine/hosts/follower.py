"""The loop of every process but process 0: it executes process 0's commands."""

from collections import deque
from collections.abc import Callable
from typing import assert_never

import numpy as np

from engine.errors import HostsError
from engine.scheduling.host_cache.copies import Copies
from engine.step.commands import (
    AllocateCache,
    Command,
    DiscardWeights,
    DropCache,
    DropWeights,
    ForgetLogits,
    Landed,
    Leave,
    MemoryCommand,
    RemoveAdapter,
    ResetState,
    SampleKept,
    StepDescription,
    WriteAdapter,
    WriteWeights,
)
from engine.step.executor import ExecutedStep, StepExecutor


def execute_commands(executor: StepExecutor, hear: Callable[[], Command]) -> None:
    """Execute commands until Leave. HostsError if a step's tokens differ from process 0's."""
    in_flight: deque[ExecutedStep] = deque()
    landed = 0
    while not isinstance(command := hear(), Leave):
        match command:
            case StepDescription():
                in_flight.append(executor.execute(command))
            case SampleKept():
                in_flight.append(executor.sample(command))
            case ForgetLogits():
                executor.forget_logits(command.number)
            case Landed(token_ids=theirs):
                check_alike(landed, np.asarray(in_flight.popleft().token_ids), theirs)
                landed += 1
            case Copies():
                executor.copy(command)
                executor.drop_landed_copies()
            case RemoveAdapter():
                executor.remove_adapter(command.uid)
            case WriteAdapter():
                executor.write_adapter(command.uid, command.slot)
            case _:
                _change_memory(executor, command)


def _change_memory(executor: StepExecutor, command: MemoryCommand) -> None:
    match command:
        case DropCache():
            executor.drop_cache()
        case AllocateCache():
            executor.allocate_cache()
        case ResetState():
            executor.reset()
        case DropWeights():
            executor.drop_weights()
        case WriteWeights(number=number):
            executor.write_weights(number)
        case DiscardWeights(number=number):
            executor.discard_weights(number)
        case _:
            assert_never(command)


def check_alike(step: int, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises HostsError, which says where the tokens of a step differ.

    All hosts run the same program over the same batch and sample from the same all-reduced sums.
    Their tokens are equal whatever the rounding, unlike those of one request in two batches.
    """
    if not np.array_equal(ours, theirs):
        index = int(np.flatnonzero(ours != theirs)[0])
        row, here, there = index % ours.shape[-1], ours.flat[index], theirs.flat[index]
        raise HostsError(
            f"step {step} gave token {here} in row {row} here and {there} at process 0: do both have the same "
            "weights, jax and devices?"
        )
