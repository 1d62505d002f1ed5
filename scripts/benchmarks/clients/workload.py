"""What is asked for at once, and the systems that can be asked."""

from typing import Any, Protocol

import msgspec
import numpy as np

from ipc.benchmark.timeline import Timeline


class Workload(msgspec.Struct, frozen=True):
    """Prompts of token ids, each to be answered greedily with exactly ``max_tokens`` tokens."""

    prompts: list[list[int]]
    max_tokens: int
    stream: bool = True
    interval: float = 0.0
    """Seconds from sending one to sending the next."""
    structured_outputs: dict[str, Any] | None = None
    """The form of all the answers."""


class System(Protocol):
    """Something that serves a model."""

    name: str

    def run(self, workload: Workload) -> list[Timeline]:
        """The timelines of a workload, a request each."""


class Prompts:
    """Random prompts, none of which comes twice, so that no cache of prefixes has anything to give."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocabulary = vocabulary

    def take(self, count: int, length: int) -> list[list[int]]:
        """``count`` new prompts of ``length`` tokens."""
        prompts: list[list[int]] = self._rng.integers(1, self._vocabulary, (count, length)).tolist()
        return prompts


def timelines_of(system: System, workload: Workload) -> list[Timeline]:
    """The timelines, if all that was asked for came; else a figure of them would be a lie, and SystemExit says why."""
    timelines = system.run(workload)
    for timeline in timelines:
        if timeline.error is not None or timeline.tokens != workload.max_tokens:
            raise SystemExit(f"a request of {workload.max_tokens} tokens gave {timeline.tokens}: {timeline.error}")
    return timelines
