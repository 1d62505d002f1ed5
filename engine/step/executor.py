"""Owner of the device state: weights, pages, slots and the sampling key."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.paged_attention_cache import PagedAttentionCache
from engine.adapters.slot_arrays import WRITE_ADAPTER
from engine.live.live_weights import LiveWeights
from engine.live.staging import StagedWeights
from engine.live.weight_source import Rereadable
from engine.models.weights.sources.tensor_source import TensorSource
from engine.sampling.needs import Need
from engine.scheduling.host_cache.copies import Copies
from engine.speculation.history import PIECE_HEADER, History
from engine.step.commands import SampleKept, StepDescription
from engine.step.drafts.draft_programs import DRAFT, FEED_DRAFT_MODEL
from engine.step.execution_manager import ExecutionManager
from engine.step.forward_programs import (
    ADAPTED_FORWARD,
    ADAPTED_PROMPT_LOGPROBS,
    FORWARD,
    PROMPT_LOGPROBS,
    TAKE_HIDDEN,
    WRITE_EXPECTED,
    WRITE_HISTORY,
    WRITE_SLOTS,
)
from engine.step.host_cache.host_slots import HostMemory
from engine.step.inputs.prompt_logprobs import PROMPT_BLOCK
from engine.step.inputs.slot_state import SEPARATE, SlotState
from engine.step.sampling_programs import (
    BIAS,
    LOGPROBS,
    MASK,
    PENALTIES,
    TAKE_LOGITS,
    WRITE_BIAS,
    WRITE_PENALTIES,
)


@dataclass(frozen=True)
class ExecutedStep:
    """The pending results of a step."""

    token_ids: Array
    """i32[rows], or with drafts i32[2, rows] as ``verify`` gives it; of a step in which no row
    samples the packed SamplerInputs, which come with the logits."""
    logprobs: Array | None
    """[rows] of ``compute_logprobs``; None if no row wants them."""
    prompt_blocks: list[Array]
    """PROMPT_BLOCK rows of ``compute_logprobs`` each."""
    drafts: Array | None
    """i32[rows, most drafts] of DRAFT, if a draft model has drafted for the step."""


class StepExecutor:
    """Dispatches steps to this process's devices, which run them in order. Never waits for one."""

    def __init__(self, manager: ExecutionManager, seed: int, weights: LiveWeights | None = None) -> None:
        self._manager = manager
        self._weights = weights
        self._staged: dict[int, StagedWeights] = {}
        self._cache: PagedAttentionCache | None
        self._fed: Array | History
        self._slots: SlotState
        self._logits: dict[int, Array] = {}
        """By the number of a step, f32[rows, vocab] of rows that sample late."""
        self._slots_of_adapters: list[Array] = []
        slots, mesh = manager.shapes.slots, manager.mesh
        self._num_slots = slots.num_slots
        self._new_slots, self._new_fed = (mesh.maker(jax.jit(new)) for new in (slots.new_state, slots.new_fed))
        self._make_state()
        self.host = None if manager.shapes.host is None else HostMemory(manager.executable, manager.copied, mesh)
        """The tier in the host's memory, if there is one."""
        self._key = mesh.maker(partial(jax.random.key, seed))()
        self._adapters: dict[int, tuple[NDArray[Any], ...]] = {}
        """By uid, what is written to a slot."""

    def drop_cache(self) -> None:
        """Free the pages' memory and contents. No step may be in flight."""
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()
        self._cache = None
        self._logits.clear()

    def allocate_cache(self) -> None:
        """Allocate the pages again, if they were freed."""
        if self._cache is None:
            self._cache = self._manager.new_cache()

    def stage_weights(self, number: int, tensors: TensorSource, again: Rereadable | None = None) -> StagedWeights:
        """Read and check new weights for ``write_weights`` or ``discard_weights``, on any thread.
        Raises as LiveWeights does."""
        staged = self.live_weights.stage(number, tensors, again)
        self._staged[number] = staged
        return staged

    def write_weights(self, number: int) -> None:
        """Serve staged weights in the steps to come. No step may be in flight. Raises as
        LiveWeights does."""
        self.live_weights.write(self._staged.pop(number))
        self._manager.adopt_weights()

    def discard_weights(self, number: int) -> None:
        """Forget staged weights, if they were staged here."""
        self._staged.pop(number, None)

    def drop_weights(self) -> None:
        """Free the weights' memory. No step may be in flight."""
        self.live_weights.drop()
        self._manager.adopt_weights()

    @property
    def live_weights(self) -> LiveWeights:
        """The weights of the model."""
        assert self._weights is not None, "an engine without a model's weights"
        return self._weights

    def reset(self) -> None:
        """Recreate, empty, the state that a failed step loses: not weights and executables.

        Raises the device's error if even that fails.
        """
        self.drop_cache()
        if self.host is not None:
            self.host.clear()
        self._make_state()

    def copy(self, copies: Copies) -> None:
        """Dispatch copies between the device and the host. Steps before read the pages as they
        were, steps after as they are then."""
        assert self._cache is not None and self.host is not None, "asleep, or without a tier"
        self._cache = self.host.copy(self._cache, copies)

    def drop_landed_copies(self) -> None:
        """Free what copies that have arrived hold: in process 0 whoever counts them does that."""
        assert self.host is not None, "without a tier"
        self.host.take_landed()

    def add_adapter(self, uid: int, arrays: tuple[NDArray[Any], ...]) -> None:
        """Keep an adapter in host memory; on any thread, before any step has it."""
        self._adapters[uid] = arrays

    def remove_adapter(self, uid: int) -> None:
        """Free an adapter's host memory. No step will read it."""
        del self._adapters[uid]

    def write_adapter(self, uid: int, slot: int) -> None:
        """Dispatch the write of an adapter to a slot, for the steps that follow."""
        slots = self._manager.adapters
        assert slots is not None, "there are no slots"
        block = slots.placed(self._adapters[uid])
        write = self._manager.executable(WRITE_ADAPTER, slots.sizes.max_loras)
        self._slots_of_adapters = write(self._slots_of_adapters, block, np.int32(slot))

    def execute(self, step: StepDescription) -> ExecutedStep:
        """Dispatch a step to the devices."""
        assert self._cache is not None, "asleep"
        manager, executable = self._manager, self._manager.executable
        layout = manager.layout_for(step.tokens)
        # The calls themselves copy a numpy array to the device, twice as fast as device_put.
        for changes in step.changes:
            self._slots = executable(WRITE_SLOTS, SEPARATE.entries)(self._slots, changes)
        for piece in step.history:
            self._fed = executable(WRITE_HISTORY, len(piece) - PIECE_HEADER)(self._fed, piece)
        if step.expected is not None:
            self._fed = executable(WRITE_EXPECTED, self._num_slots)(self._fed, step.expected)
        drafts = None
        if step.drafted is not None:
            draft = executable(DRAFT, step.drafted.shape[1])
            self._cache, self._fed, drafts = draft(
                manager.draft_weights, self._cache, self._slots, self._fed, step.drafted, self._key
            )
        if step.feeds_draft_model:
            feed = executable(FEED_DRAFT_MODEL, layout.tokens)
            self._cache = feed(manager.draft_weights, self._cache, self._slots, self._fed, step.packed)
        forward = executable(ADAPTED_FORWARD if step.has_adapters else FORWARD, layout.tokens)
        adapters = [self._slots_of_adapters] if step.has_adapters else []
        self._cache, self._slots, logits, hidden, sampling = forward(
            manager.weights, self._cache, self._slots, self._fed, step.packed, *adapters
        )
        if step.kept is not None:
            kept, rows = step.kept.number, step.kept.rows
            self._logits[kept] = logits if rows is None else executable(TAKE_LOGITS, layout.rows)(logits, rows)
        self._write_slots(step)
        token_ids, logprobs = sampling, None
        if step.samples:
            token_ids, logprobs = self._sample(logits, sampling, step.needs, step.masks)
        blocks = []
        if step.prompt_tokens is not None:
            taken = [(executable(TAKE_HIDDEN, layout.tokens)(hidden, block[0]), block) for block in step.prompt_tokens]
            blocks = [self._prompt_logprobs(of_block, block, step.has_adapters) for of_block, block in taken]
        return _executed(token_ids, logprobs, blocks, drafts)

    def sample(self, command: SampleKept) -> ExecutedStep:
        """Dispatch the sampling of rows whose logits are kept."""
        logits = self._logits[command.number]
        return _executed(*self._sample(logits, command.sampling, command.needs, command.masks), [])

    def forget_logits(self, number: int) -> None:
        """Free the logits that are kept of a step."""
        del self._logits[number]

    def _prompt_logprobs(self, hidden: Array, block: NDArray[np.int32], has_adapters: bool) -> Array:
        """Of PROMPT_BLOCK hidden states f[PROMPT_BLOCK, hidden]."""
        manager, (_, targets, slots) = self._manager, block
        adapters = manager.adapters if has_adapters else None
        if adapters is None or adapters.head is None:
            logprobs: Array = manager.executable(PROMPT_LOGPROBS, PROMPT_BLOCK)(manager.head, hidden, targets)
            return logprobs
        arrays = adapters.of_head(self._slots_of_adapters)
        compute = manager.executable(ADAPTED_PROMPT_LOGPROBS, PROMPT_BLOCK)
        adapted: Array = compute(manager.head, hidden, targets, arrays, slots)
        return adapted

    def _make_state(self) -> None:
        self._cache = self._manager.new_cache()
        self._slots, self._fed = self._new_slots(), self._new_fed()
        self._bias = self._manager.sampling.new_bias()
        self._penalties = self._manager.sampling.new_penalties()
        for array in self._slots_of_adapters:
            array.delete()  # before there are new ones: they may be too large to have twice
        self._slots_of_adapters = [] if self._manager.adapters is None else self._manager.adapters.new()

    def _write_slots(self, step: StepDescription) -> None:
        """Write the bias and the penalties of sequences that got a slot."""
        executable, place = self._manager.executable, self._manager.sampling.place
        for slot, bias in step.bias:
            self._bias = executable(WRITE_BIAS, self._num_slots)(self._bias, np.int32(slot), place(bias))
        for slot, counts in step.penalties:
            self._penalties = executable(WRITE_PENALTIES, self._num_slots)(
                self._penalties, np.int32(slot), place(counts)
            )

    def _sample(
        self, logits: Array, sampling: Array | NDArray[np.int32], needs: Need, masks: NDArray[np.int32] | None
    ) -> tuple[Array, Array | None]:
        """Tokens i32[rows] from logits f32[rows, vocab], and their log-probabilities if a row needs
        them, of rows that do not have the dump slot."""
        processed, for_rows = logits, partial(self._manager.executable, size=sampling.shape[1])
        if Need.BIAS in needs:
            self._bias, processed = for_rows(BIAS)(self._bias, processed, self._fed, sampling)
        if Need.PENALTIES in needs:
            self._penalties, processed = for_rows(PENALTIES)(self._penalties, processed, self._fed, sampling)
        if masks is not None:
            processed = for_rows(MASK)(processed, masks)
        draw = for_rows(self._manager.sampling.sampler(needs))
        token_ids, self._fed = draw(processed, self._fed, sampling, self._key)
        return token_ids, for_rows(LOGPROBS)(logits, token_ids) if Need.LOGPROBS in needs else None


def _executed(
    token_ids: Array, logprobs: Array | None, prompt_blocks: list[Array], drafts: Array | None = None
) -> ExecutedStep:
    """Results, of which all but the drafts are to be copied to the host."""
    for result in (token_ids, logprobs, *prompt_blocks):
        if result is not None:
            result.copy_to_host_async()
    return ExecutedStep(token_ids, logprobs, prompt_blocks, drafts)
