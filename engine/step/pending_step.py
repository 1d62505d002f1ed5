"""A step between its dispatch and its results, and what its rows give by them."""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.devices.device_errors import DeviceError
from engine.sampling.logprobs import unpack_logprobs
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.sequence import TokenLogprobs
from engine.speculation.verification import NOT_TEXT, OF_EARLIER
from engine.step.executor import ExecutedStep
from engine.step.inputs.prompt_logprobs import PromptLogprobs
from engine.step.timing.step_gap import Result
from engine.step.timing.step_times import StepTimes


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step and its pending results."""

    plan: NextIterationPlan
    executed: ExecutedStep | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """The rows of ``executed.prompt_blocks``, in order."""
    failure: DeviceError | None = None
    """The device's error, if the dispatch itself failed."""
    times: StepTimes = field(default_factory=StepTimes)
    """Of its phases, from ``prepare`` on."""
    places: list[int] | None = None
    """Where the plan's rows are among those of ``executed``; None if they are the first ones."""

    @property
    def is_step(self) -> bool:
        """Whether it computes tokens, and does not sample alone."""
        return self.plan.samples_of is None

    @property
    def is_done(self) -> bool:
        """Whether its tokens are there, or never will be."""
        return self.executed is None or cast(Result, self.executed.token_ids).is_ready()

    def result(self, drawn: NDArray[np.int32]) -> StepResult:
        """What its rows give, of what the sampler has ``drawn``: waits for the log-probabilities of those that request
        some."""
        assert self.executed is not None
        rows = self.places or self.plan.sampler_rows(drafts=drawn.ndim > 1)
        ids, found = _landed(self.plan, drawn, rows)
        logprobs = _logprobs(self, self.executed.logprobs, rows, ids)
        drafts, of_earlier = [count % OF_EARLIER for count in found], [count >= OF_EARLIER for count in found]
        return StepResult(ids, logprobs, _prompt_logprobs(self, self.executed), drafts, of_earlier)


def _landed(plan: NextIterationPlan, drawn: NDArray[np.int32], rows: ListOf[int]) -> tuple[list[list[int]], list[int]]:
    """By row of the plan, the tokens that it gave, and its drafts as ``verify`` says how many, if rows
    may have some.

    ``rows`` are those of the sampler, and ``drawn`` what it gave.
    """
    if not any(plan.samples):
        return [[] for _ in plan.sequences], []
    if drawn.ndim == 1:
        token_ids: list[int] = drawn.tolist()
        return [[token_ids[row]] if samples else [] for row, samples in zip(rows, plan.samples, strict=True)], []
    ids, drafts = drawn.tolist()
    sampled = [ids[first : first + count] for first, count in zip(rows, plan.samples, strict=False)]
    kept = [row[: row.index(NOT_TEXT)] if NOT_TEXT in row else row for row in sampled]
    return kept, [drafts[first] for first in rows[: plan.num_rows]]


def _logprobs(
    step: PendingStep, logprobs: Array | None, rows: ListOf[int], ids: list[list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """By row, for rows that sample and request them."""
    if logprobs is None:
        return {}
    table = np.asarray(logprobs)
    return {
        row: [unpack_logprobs(table[first + at], token, count) for at, token in enumerate(token_ids)]
        for row, (sequence, first, token_ids) in enumerate(zip(step.plan.sequences, rows, ids, strict=False))
        if token_ids and (count := sequence.params.logprobs) is not None
    }


def _prompt_logprobs(step: PendingStep, executed: ExecutedStep) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """By row, the first prompt token of this step and the logprobs from it on."""
    if not executed.prompt_blocks:
        return {}
    table = np.concatenate([np.asarray(block) for block in executed.prompt_blocks])
    found, at = {}, 0
    for one in step.prompt_logprobs:
        sequence = step.plan.sequences[one.row]
        count = sequence.params.prompt_logprobs or 0
        tokens = sequence.prompt_token_ids[one.first : one.first + one.count]
        rows = table[at : at + one.count]
        found[one.row] = (
            one.first,
            [unpack_logprobs(row, token, count) for row, token in zip(rows, tokens, strict=True)],
        )
        at += one.count
    return found
