"""The one owner of device state: weights, pages, last tokens and the sampling key."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.paged_attention_cache import PagedAttentionCache
from engine.mesh import DeviceMesh
from engine.sampling.sampling_metadata import Need
from engine.step.execution_manager import ExecutionManager, StepShapes
from engine.step.model_io import StepLayout
from engine.step.step_description import StepDescription


@dataclass(frozen=True)
class ExecutedStep:
    """Where the results of a step will be."""

    token_ids: Array
    """i32[rows]"""
    logprobs: Array | None
    """[rows] of ``compute_logprobs``, where a row asked for them."""
    prompt_blocks: list[Array]
    """PROMPT_BLOCK rows of ``compute_logprobs`` each."""


class StepExecutor:
    """Gives steps to this process's devices. Steps run in the order they are given; nothing here waits for one."""

    def __init__(
        self,
        manager: ExecutionManager,
        shapes: StepShapes,
        allocate: Callable[[], PagedAttentionCache],
        seed: int,
        mesh: DeviceMesh,
    ) -> None:
        self._manager = manager
        self._allocate = allocate
        self._cache: PagedAttentionCache | None
        self._last_token: Array
        self._new_last_token = mesh.maker(partial(jnp.zeros, shapes.max_num_seqs + 1, jnp.int32))
        self._make_state()
        self._key = mesh.maker(partial(jax.random.key, seed))()

    def drop_cache(self) -> None:
        """Give the pages' memory back, with all that is in it. No step may be in flight."""
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()
        self._cache = None

    def allocate_cache(self) -> None:
        """Take the pages' memory again, if it was given back."""
        if self._cache is None:
            self._cache = self._allocate()

    def reset(self) -> None:
        """Make anew, and empty, what a failed step may have spoilt or taken with it: all but weights and functions.

        Where the device cannot even do that, its error comes out.
        """
        self.drop_cache()
        self._make_state()

    def execute(self, step: StepDescription) -> ExecutedStep:
        """Give a step to the devices."""
        assert self._cache is not None, "asleep"
        layout, functions = self._manager.layout_for(step.tokens), self._manager.sampling
        forward, draw = self._manager.forward(layout), functions.sampler(layout, step.variant)
        # A numpy array is copied to the device by the call itself, in less than half of device_put's time.
        self._cache, logits, hidden, sampling = forward(
            self._manager.weights, self._cache, self._last_token, step.packed
        )
        processed = self._process(layout, step, logits, sampling)
        if step.masks is not None:
            processed = functions.mask(layout)(processed, step.masks)
        token_ids, self._last_token = draw(processed, self._last_token, sampling, self._key)
        logprobs, blocks = None, []
        if step.needs & Need.LOGPROBS:
            logprobs = functions.logprobs(layout)(logits, token_ids)
        if step.prompt_tokens is not None:
            blocks = [
                self._manager.prompt_logprobs(layout, hidden, places, targets) for places, targets in step.prompt_tokens
            ]
        for result in (token_ids, logprobs, *blocks):
            if result is not None:
                result.copy_to_host_async()
        return ExecutedStep(token_ids, logprobs, blocks)

    def _make_state(self) -> None:
        self._cache = self._allocate()
        self._last_token = self._new_last_token()
        self._bias = self._manager.sampling.new_bias()
        self._penalties = self._manager.sampling.new_penalties()

    def _process(self, layout: StepLayout, step: StepDescription, logits: Array, sampling: Array) -> Array:
        """The logits with bias and penalties, where a row has any."""
        functions = self._manager.sampling
        for slot, bias in step.bias:
            self._bias = functions.write_bias(self._bias, np.int32(slot), bias)
        for slot, counts in step.penalties:
            self._penalties = functions.write_penalties(self._penalties, np.int32(slot), counts)
        if step.needs & Need.BIAS:
            self._bias, logits = functions.bias(layout)(self._bias, logits, self._last_token, sampling)
        if step.needs & Need.PENALTIES:
            self._penalties, logits = functions.penalize(layout)(self._penalties, logits, self._last_token, sampling)
        return logits
