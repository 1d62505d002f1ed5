"""Runs plans as steps of the device and returns their results."""

import itertools
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.adapters.adapter import Adapter
from engine.adapters.slot_arrays import SlotArrays
from engine.device_errors import DeviceError, device_errors
from engine.hosts.other_processes import ALONE, OtherProcesses
from engine.live.live_weights import LiveWeights
from engine.live.staging import StagedWeights
from engine.live.weight_source import Rereadable, WeightSource
from engine.sampling.logprobs import unpack_logprobs
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.sequence import TokenLogprobs
from engine.speculation.verification import NOT_TEXT, OF_EARLIER
from engine.step.commands import (
    AllocateCache,
    DiscardWeights,
    DropCache,
    DropWeights,
    Landed,
    MakeCopies,
    RemoveAdapter,
    ResetState,
    WriteAdapter,
    WriteWeights,
)
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import ExecutedStep, StepExecutor
from engine.step.host_cache.host_memory import HostMemory
from engine.step.inputs.model_io import ModelIOProcessor
from engine.step.inputs.prompt_logprobs import PromptLogprobs
from engine.step.timing.step_gap import Result, StepGaps
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


class eSurgeRunner:
    """Runs plans. ``dispatch`` returns before the device is done; ``collect`` waits for it.

    The ``others`` hear every command, in order (engine/hosts/processes.py).
    """

    def __init__(
        self,
        manager: ExecutionManager,
        seed: int,
        others: OtherProcesses = ALONE,
        weights: LiveWeights | None = None,
    ) -> None:
        self.gaps = StepGaps()
        self._manager = manager
        self._stage_everywhere, self._tell, self._send_adapter = others.stage, others.tell, others.send_adapter
        self._staging_numbers = itertools.count()
        self._executor = StepExecutor(manager, seed, weights)
        self._io = ModelIOProcessor(
            manager.shapes.slots, manager.sampling.vocab_size, manager.shapes.few_rows, manager.shapes.draft_rows,
            feeds_drafts=manager.feeds_drafts,
        )  # fmt: skip

    def drop_cache(self) -> None:
        """Free the pages' memory and contents. No step may be in flight."""
        self._tell(DropCache())
        self._executor.drop_cache()
        self._io.lose_logits()

    def allocate_cache(self) -> None:
        """Allocate the pages again, if they were freed."""
        self._tell(AllocateCache())
        self._executor.allocate_cache()

    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Read and check new weights in every process, on any thread.

        Raises ConfigurationError if one of them refuses: then none has them.
        """
        number, again = next(self._staging_numbers), source if isinstance(source, Rereadable) else None
        with self._executor.live_weights.open(source) as tensors:
            try:
                return self._stage_everywhere(
                    number, source, tensors, lambda: self._executor.stage_weights(number, tensors, again)
                )
            except BaseException:  # another process's refusal comes when these are staged here
                self._executor.discard_weights(number)
                raise

    def write_weights(self, staged: StagedWeights) -> None:
        """Serve new weights in the steps to come. No step may be in flight.

        Raises ConfigurationError if they cannot be written; after a DeviceError they are lost.
        """
        self._executor.live_weights.check(staged)
        self._tell(WriteWeights(staged.number))
        with device_errors():
            self._executor.write_weights(staged.number)

    def discard_weights(self, staged: StagedWeights) -> None:
        """Forget staged weights, in every process."""
        self._tell(DiscardWeights(staged.number))
        self._executor.discard_weights(staged.number)

    def drop_weights(self) -> None:
        """Free the weights' memory. No step may be in flight."""
        self._tell(DropWeights())
        self._executor.drop_weights()

    @property
    def adapters(self) -> SlotArrays | None:
        """The slots of adapters, if there are such."""
        return self._manager.adapters

    def send_adapter(self, adapter: Adapter) -> None:
        """Have the other processes keep an adapter in host memory, on any thread."""
        self._send_adapter(adapter)

    def add_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter in host memory, where the other processes have it (``send_adapter``)."""
        self._executor.add_adapter(adapter.uid, adapter.arrays)

    def remove_adapter(self, uid: int) -> None:
        """Free an adapter's host memory. No plan will write it to a slot."""
        self._tell(RemoveAdapter(uid))
        self._executor.remove_adapter(uid)

    @property
    def host(self) -> HostMemory | None:
        """This process's part of the tier in the host's memory, if there is one."""
        return self._executor.host

    def dispatch(self, plan: NextIterationPlan) -> PendingStep:
        """Dispatch a plan to the device, its copies first. Steps run in order.

        If a step has a ``failure``, ``collect`` raises it. Dispatch no other before ``reset``.
        """
        try:
            with device_errors():
                return self._dispatch(plan)
        except DeviceError as error:
            return PendingStep(plan, failure=error)

    def sample(self, plan: NextIterationPlan) -> PendingStep:
        """Dispatch a plan that samples from the kept logits of an earlier one, as ``dispatch``
        does."""
        try:
            with device_errors():
                command, places = self._io.prepare_late(plan)
                self._tell(command)
                self.gaps.look()
                executed = self._executor.sample(command)
                self.gaps.sampling(cast(Result, executed.token_ids))
                return PendingStep(plan, executed, places=places)
        except DeviceError as error:
            return PendingStep(plan, failure=error)

    def forget_logits(self, plan: NextIterationPlan) -> None:
        """Free the logits that are kept of a plan, if they still are."""
        command = self._io.forget_logits(plan)
        if command is not None:
            self._tell(command)
            self._executor.forget_logits(command.number)

    def collect(self, step: PendingStep) -> StepResult:
        """Wait for a step and return its rows' sampled tokens and requested log-probabilities.

        Raises DeviceError. Later steps in flight are then invalid, and ``reset`` must follow.
        """
        if step.failure is not None:
            raise step.failure
        with device_errors():
            assert step.executed is not None
            step.times.resume(was_ready=step.is_done)
            drawn = np.asarray(step.executed.token_ids)
            step.times.end("wait")
            self._tell(Landed(drawn))
            self.gaps.look()
            rows = step.places or step.plan.sampler_rows(drafts=drawn.ndim > 1)
            ids, found = _landed(step.plan, drawn, rows)
            logprobs = _logprobs(step, step.executed.logprobs, rows, ids)
            drafts, of_earlier = [count % OF_EARLIER for count in found], [count >= OF_EARLIER for count in found]
            return StepResult(ids, logprobs, _prompt_logprobs(step, step.executed), drafts, of_earlier)

    def read_guesses(self, step: PendingStep) -> None:
        """Wait for the drafts that a draft model writes in a step for rows with constraints, and note
        them in its plan. Its dispatch has not failed. Raises DeviceError as ``collect`` does."""
        plan, executed = step.plan, step.executed
        assert executed is not None and executed.drafts is not None
        with device_errors():
            drafts = np.asarray(executed.drafts).tolist()
        late = set(plan.late)
        for row, ids in zip(plan.drafted, drafts, strict=False):
            if row in late:
                plan.guesses[row] = list(takewhile(lambda token_id: token_id >= 0, ids))

    def reset(self) -> None:
        """As ``StepExecutor.reset``. No sequence may have a slot."""
        self._tell(ResetState())
        self._executor.reset()
        self._io.lose_state()
        self.gaps.rest()

    def _copy(self, copies: Copies) -> None:
        command = MakeCopies(copies.stores, copies.places, copies.fetches, copies.of_states)
        self._tell(command)
        self._executor.copy(command)

    def _dispatch(self, plan: NextIterationPlan) -> PendingStep:
        self.gaps.look()
        times = StepTimes()
        for copies in plan.copies:
            self._copy(copies)
        if not plan.num_rows:
            return PendingStep(plan, times=times)
        for uid, slot in plan.adapter_loads:
            self._tell(WriteAdapter(uid, slot))
            self._executor.write_adapter(uid, slot)
        layout = self._manager.layout_for(plan.num_tokens)
        step, prompt_logprobs = self._io.prepare(plan, layout)
        times.end("prepare")
        self._tell(step)
        self.gaps.look()
        executed = self._executor.execute(step)
        if plan.has_guesses and executed.drafts is not None:
            executed.drafts.copy_to_host_async()
        self.gaps.dispatched(cast(Result, executed.token_ids))  # jax's types lack is_ready
        times.end("dispatch")
        return PendingStep(plan, executed, prompt_logprobs, times=times)


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
