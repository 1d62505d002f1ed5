"""The one owner of device state: weights, pages, last tokens and the sampling key."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.paged_attention_cache import PagedAttentionCache
from engine.device_errors import DeviceError, device_errors
from engine.execution_manager import PROMPT_BLOCK, ExecutionManager, StepShapes
from engine.logit_bias import bias_of
from engine.logprobs import unpack_logprobs
from engine.mesh import DeviceMesh
from engine.model_io import ModelIOProcessor, StepLayout
from engine.penalties import penalties_of
from engine.plan import NextIterationPlan, StepResult
from engine.sampling_metadata import ModelRunnerSamplingMetadata, Need, PromptLogprobs
from engine.sequence import TokenLogprobs
from engine.step_gap import Result, StepGaps
from engine.token_masks import pack_masks


@dataclass(frozen=True)
class PendingStep:
    """A step the device has been given, and where its results will be."""

    plan: NextIterationPlan
    token_ids: Array | None = None
    """i32[rows]"""
    logprobs: Array | None = None
    """[rows] of ``compute_logprobs``, where a row asked for them."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    prompt_blocks: list[Array] = field(default_factory=list)
    """PROMPT_BLOCK rows of ``compute_logprobs`` each, for all ``prompt_logprobs`` one after the other."""
    failure: DeviceError | None = None
    """What the device said, where it did not even begin."""


class eSurgeRunner:
    """Runs plans. ``dispatch`` returns before the device is done; ``collect`` waits for it."""

    def __init__(
        self,
        manager: ExecutionManager,
        shapes: StepShapes,
        allocate: Callable[[], PagedAttentionCache],
        seed: int,
        mesh: DeviceMesh,
    ) -> None:
        self.gaps = StepGaps()
        self._manager = manager
        self._shapes = shapes
        self._allocate = allocate
        self._cache: PagedAttentionCache | None
        self._new_last_token = mesh.maker(partial(jnp.zeros, shapes.max_num_seqs + 1, jnp.int32))
        self._make_state()
        self._key = mesh.maker(partial(jax.random.key, seed))()
        self._io = ModelIOProcessor(
            max_num_seqs=shapes.max_num_seqs,
            max_model_len=shapes.max_model_len,
            pages_per_seq=shapes.pages_per_seq,
        )

    def drop_cache(self) -> None:
        """Give the pages' memory back, with all that is in it. No step may be in flight."""
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()
        self._cache = None

    def allocate_cache(self) -> None:
        """Take the pages' memory again, if it was given back."""
        if self._cache is None:
            self._cache = self._allocate()

    def dispatch(self, plan: NextIterationPlan) -> PendingStep:
        """Send a plan to the device. Steps run in the order they are dispatched.

        One that has a ``failure`` will fail when it is collected; nothing may be dispatched after it before ``reset``.
        """
        try:
            with device_errors():
                return self._dispatch(plan)
        except DeviceError as error:
            return PendingStep(plan, failure=error)

    def collect(self, step: PendingStep) -> StepResult:
        """Wait for a step and return what its rows sampled, with the log-probabilities that were asked for.

        Raises DeviceError; then steps dispatched after it are worth nothing, and ``reset`` has to follow.
        """
        if step.failure is not None:
            raise step.failure
        with device_errors():
            assert step.token_ids is not None
            ids: list[int] = np.asarray(step.token_ids)[: step.plan.num_rows].tolist()
            self.gaps.look()
            return StepResult(ids, _logprobs(step, ids), _prompt_logprobs(step))

    def reset(self) -> None:
        """Make anew, and empty, what a failed step may have spoilt or taken with it: all but weights and functions.

        No sequence may have a slot. Where the device cannot even do that, its error comes out.
        """
        self.drop_cache()
        self._make_state()
        self.gaps.rest()

    def _make_state(self) -> None:
        self._cache = self._allocate()
        self._last_token = self._new_last_token()
        self._bias = self._manager.sampling.new_bias()
        self._penalties = self._manager.sampling.new_penalties()

    def _dispatch(self, plan: NextIterationPlan) -> PendingStep:
        assert self._cache is not None, "asleep"
        self.gaps.look()
        layout = self._manager.layout_for(plan.num_tokens)
        packed, metadata = self._io.prepare(plan, layout)
        forward, draw = self._manager.forward(layout), self._manager.sampling.sampler(layout, metadata.variant)
        self.gaps.look()
        # A numpy array is copied to the device by the call itself, in less than half of device_put's time.
        self._cache, logits, hidden, sampling = forward(self._manager.weights, self._cache, self._last_token, packed)
        processed = self._process(layout, metadata, logits, sampling)
        if plan.constrained:
            masks = pack_masks(plan, layout.rows, self._manager.sampling.vocab_size)
            processed = self._manager.sampling.mask(layout)(processed, masks)
        token_ids, self._last_token = draw(processed, self._last_token, sampling, self._key)
        self.gaps.dispatched(cast(Result, token_ids))  # jax's types leave is_ready out
        logprobs, blocks = None, []
        if metadata.needs & Need.LOGPROBS:
            logprobs = self._manager.sampling.logprobs(layout)(logits, token_ids)
        if metadata.prompt_logprobs:
            blocks = self._prompt_blocks(layout, plan, metadata.prompt_logprobs, hidden)
        for result in (token_ids, logprobs, *blocks):
            if result is not None:
                result.copy_to_host_async()
        return PendingStep(plan, token_ids, logprobs, metadata.prompt_logprobs, blocks)

    def _process(
        self, layout: StepLayout, metadata: ModelRunnerSamplingMetadata, logits: Array, sampling: Array
    ) -> Array:
        """The logits with bias and penalties, where a row has any."""
        functions, vocab_size = self._manager.sampling, self._manager.sampling.vocab_size
        for sequence in metadata.to_bias:
            row = bias_of(sequence, vocab_size)
            self._bias = functions.write_bias(self._bias, np.int32(sequence.slot), row)
        for sequence in metadata.to_penalize:
            counts = penalties_of(sequence, vocab_size)
            self._penalties = functions.write_penalties(self._penalties, np.int32(sequence.slot), counts)
        if metadata.needs & Need.BIAS:
            self._bias, logits = functions.bias(layout)(self._bias, logits, self._last_token, sampling)
        if metadata.needs & Need.PENALTIES:
            self._penalties, logits = functions.penalize(layout)(self._penalties, logits, self._last_token, sampling)
        return logits

    def _prompt_blocks(
        self, layout: StepLayout, plan: NextIterationPlan, asked: list[PromptLogprobs], hidden: Array
    ) -> list[Array]:
        """Log-probabilities of prompt tokens, a block of places at a time; what is left of the last block is for nobody."""
        places = np.concatenate([np.arange(one.start, one.start + one.count) for one in asked])
        targets = np.concatenate(
            [plan.sequences[one.row].prompt_token_ids[one.first : one.first + one.count] for one in asked]
        )
        flat = np.zeros((2, -(-len(places) // PROMPT_BLOCK) * PROMPT_BLOCK), np.int32)
        flat[:, : len(places)] = places, targets
        blocks = zip(*flat.reshape(2, -1, PROMPT_BLOCK), strict=True)
        return [self._manager.prompt_logprobs(layout, hidden, *block) for block in blocks]


def _logprobs(step: PendingStep, ids: list[int]) -> dict[int, TokenLogprobs]:
    """By row, where a row samples and asked for them."""
    if step.logprobs is None:
        return {}
    table = np.asarray(step.logprobs)
    return {
        row: unpack_logprobs(table[row], ids[row], sequence.params.logprobs)
        for row, (sequence, samples) in enumerate(zip(step.plan.sequences, step.plan.samples, strict=True))
        if samples and sequence.params.logprobs is not None
    }


def _prompt_logprobs(step: PendingStep) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """By row, the first prompt token that the step has any of, and theirs."""
    if not step.prompt_blocks:
        return {}
    table = np.concatenate([np.asarray(block) for block in step.prompt_blocks])
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
