"""What the steps of an engine have done, and how long they took."""

import logging
from collections.abc import Mapping
from typing import Any

from engine.metrics.histogram import Histogram
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import SequenceOutput
from engine.step.timing.step_times import StepTimes, step_histograms

logger = logging.getLogger(__name__)


class StepLog:
    """Counts steps and tokens since ``start_counting``. One thread writes it."""

    def __init__(self) -> None:
        self.start_counting()

    def start_counting(self) -> None:
        """Reset all counts."""
        self.seconds: Mapping[str, Histogram] = step_histograms()
        """Of each step that landed, by phase; any thread may read them."""
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def landed(self, plan: NextIterationPlan, times: StepTimes) -> None:
        """A step has landed, and the scheduler knows its tokens."""
        self._steps += 1
        self._prompt_tokens += plan.num_tokens - plan.num_decode_tokens
        times.end("land")
        for phase, seconds in times.seconds.items():
            self.seconds[phase].observe(seconds)
        if logger.isEnabledFor(logging.DEBUG):
            facts: dict[str, float] = {
                "step": self._steps,
                "tokens": plan.num_tokens,
                "rows": plan.num_rows,
                "decodes": plan.num_decodes,
            }
            logger.debug(
                "step %d: %d tokens in %d rows, %d of them decode; %s",
                *facts.values(), times, extra=facts | times.seconds,
            )  # fmt: skip

    def generated(self, outputs: list[SequenceOutput]) -> None:
        """Sequences have these tokens."""
        self._generated_tokens += sum([len(output.token_ids) for output in outputs])

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "steps": self._steps,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            "step_seconds": {phase: histogram.sum for phase, histogram in self.seconds.items()},
        }
