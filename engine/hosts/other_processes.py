"""What a runner needs of the other processes of its engine, and the engine that has none."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.adapters.adapter import Adapter
from engine.live.staging import StagedWeights
from engine.live.weight_source import WeightSource
from engine.models.weights.sources.tensor_source import TensorSource
from engine.step.commands import Command

SendAdapter = Callable[[Adapter], None]
StageHere = Callable[[], StagedWeights]
StageEverywhere = Callable[[int, WeightSource, TensorSource, StageHere], StagedWeights]


def tell_nobody(command: Command) -> None:
    """For an engine in a single process."""
    del command


def send_to_nobody(adapter: Adapter) -> None:
    """For an engine in a single process."""
    del adapter


def stage_here_alone(number: int, source: WeightSource, tensors: TensorSource, stage_here: StageHere) -> StagedWeights:
    """For an engine in a single process."""
    del number, source, tensors
    return stage_here()


@dataclass(frozen=True)
class OtherProcesses:
    """Those of other hosts; by default there are none."""

    tell: Callable[[Command], None] = tell_nobody
    """Sends a command to all of them, in order."""
    stage: StageEverywhere = stage_here_alone
    """Has all of them stage new weights under a number, and calls the last argument, which stages
    them here, meanwhile. Raises ConfigurationError, and then nobody has them staged."""
    send_adapter: SendAdapter = send_to_nobody
    """Has all of them keep an adapter in host memory; on any thread."""


ALONE = OtherProcesses()
