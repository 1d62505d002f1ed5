"""Runs plans as steps of the device and returns their results."""

import itertools
from itertools import takewhile
from typing import cast

import numpy as np

from engine.adapters.adapter import Adapter
from engine.adapters.slot_arrays import SlotArrays
from engine.devices.device_errors import DeviceError, device_errors
from engine.hosts.other_processes import ALONE, OtherProcesses
from engine.live.live_weights import LiveWeights
from engine.live.staging import StagedWeights
from engine.live.weight_source import Rereadable, WeightSource
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.step.commands import (
    AllocateCache,
    DiscardWeights,
    DropCache,
    DropWeights,
    Landed,
    RemoveAdapter,
    ResetState,
    WriteAdapter,
    WriteWeights,
)
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import StepExecutor
from engine.step.host_cache.host_slots import HostMemory
from engine.step.inputs.model_io import ModelIOProcessor
from engine.step.pending_step import PendingStep
from engine.step.timing.step_gap import Result, StepGaps
from engine.step.timing.step_times import StepTimes


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
            return step.result(drawn)

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
        self._tell(copies)
        self._executor.copy(copies)

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
