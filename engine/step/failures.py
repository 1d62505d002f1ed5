"""What a failed step costs.

The sequences in it end with an error, because the device does not say which of them caused the
failure. The cache was donated to the step and is lost, and so are the steps dispatched after it.
Those are dropped unread, everything on the device but the weights is allocated again, and all
other running sequences are recomputed from their tokens. They sample with the same random
numbers, which depend on seed and position alone, from logits that are the same up to rounding
(on a CPU to the bit). Steps in flight before the failed one complete normally. If
MAX_FAILURES_IN_A_ROW steps fail and none completes between them, the fault is permanent:
DeviceError is raised. On several hosts the first failure is enough: one process sees it.

A row whose logits hold NaN or infinity ends only its own sequence with an error: no row reads
another's logits, or a page beyond its owner's last token. Tokens before these logits count: one
that ends the sequence ends it as ever.
"""

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

from engine.devices.device_errors import DeviceError
from engine.sampling.sampler import NO_TOKEN
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence, SequenceOutput

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""One request may cause a single failure, and has ended with it."""
NOT_FINITE = (
    "the model's logits for this request hold NaN or infinity, so it has no next token; other requests are not affected"
)


class Failures:
    """Ends the sequences of failed steps and rows, and counts both. An engine's thread owns it."""

    def __init__(self, scheduler: InferenceScheduler, most_in_a_row: int) -> None:
        self._scheduler = scheduler
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0
        self.start_counting()

    def start_counting(self) -> None:
        """Reset the counts of ``num_steps`` and ``num_rows``."""
        self.num_steps = 0
        """Steps that failed."""
        self.num_rows = 0
        """Sequences that ended because their logits were not finite."""

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {"failed_steps": self.num_steps, "failed_rows": self.num_rows}

    def end_rows(
        self, plan: NextIterationPlan, result: StepResult, land: Callable[[], list[SequenceOutput]]
    ) -> list[SequenceOutput]:
        """``land`` a completed step, whose rows are cut before logits that are not finite.

        What is before them is the text as it is without drafts. Sequences that it has not ended end
        with an error, and the pages of all of them are dropped from the prefix cache.
        """
        self._in_a_row = 0
        if NO_TOKEN not in chain.from_iterable(result.token_ids):
            return land()
        without_tokens, spoilt = list[Sequence](), list[Sequence]()
        for sequence, token_ids in zip(plan.sequences, result.token_ids, strict=True):
            if NO_TOKEN in token_ids:
                del token_ids[token_ids.index(NO_TOKEN) :]
                spoilt.append(sequence)
                if not token_ids:
                    without_tokens.append(sequence)
        failed = self._end(without_tokens, NOT_FINITE)
        landed = land()
        failed += self._end(spoilt, NOT_FINITE)
        self._scheduler.memory.forget(spoilt)
        self.num_rows += len(failed)
        for output in failed:
            about = {"request_id": output.request_id}
            logger.error("request %s ends: %s", output.request_id, NOT_FINITE, extra=about)
        return landed + failed

    def end_step(self, plan: NextIterationPlan, failure: DeviceError) -> list[SequenceOutput]:
        """End the sequences of a failed step; the caller has all others computed again.

        Raises DeviceError if the fault is permanent.
        """
        self.num_steps += 1
        self._in_a_row += 1
        if self._in_a_row == self._most_in_a_row:
            many = f"{self._in_a_row} steps in a row failed, the last one by"
            raise DeviceError(f"{many if self._in_a_row > 1 else 'a step failed'}: {failure}") from failure
        why = f"a step failed on the device ({failure}), and this request was in it; the daemon goes on: send it again"
        outputs = self._end(plan.sequences, why)
        logger.error(
            "a step failed (%s): %d requests in it end with an error, %d others are computed again",
            failure, len(outputs), self._scheduler.num_running,
        )  # fmt: skip
        return outputs

    def _end(self, sequences: list[Sequence], why: str) -> list[SequenceOutput]:
        return [
            SequenceOutput(sequence.request_id, [], "error", error=why, internal=True)
            for sequence in sequences
            if self._scheduler.finish(sequence.request_id)
        ]
