"""The one owner of device state: weights, pages, last tokens and the sampling key."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.paged_attention_cache import PagedAttentionCache
from engine.execution_manager import ExecutionManager, StepShapes
from engine.model_io import ModelIOProcessor
from engine.plan import NextIterationPlan
from engine.step_gap import Result, StepGaps
from engine.token_masks import pack_masks


@dataclass(frozen=True)
class PendingStep:
    """A step the device has been given, and where its ids will be."""

    plan: NextIterationPlan
    token_ids: Array
    """i32[rows]"""


class eSurgeRunner:
    """Runs plans. ``dispatch`` returns before the device is done; ``collect`` waits for it."""

    def __init__(self, manager: ExecutionManager, shapes: StepShapes, cache: PagedAttentionCache, seed: int) -> None:
        self.gaps = StepGaps()
        self._manager = manager
        self._cache = cache
        self._last_token = jnp.zeros(shapes.max_num_seqs + 1, jnp.int32)
        self._key = jax.random.key(seed)
        self._io = ModelIOProcessor(
            max_num_seqs=shapes.max_num_seqs,
            max_model_len=shapes.max_model_len,
            pages_per_seq=shapes.pages_per_seq,
        )

    def dispatch(self, plan: NextIterationPlan) -> PendingStep:
        """Send a plan to the device. Steps run in the order they are dispatched."""
        self.gaps.look()
        layout = self._manager.layout_for(plan.num_tokens)
        packed, variant = self._io.prepare(plan, layout)
        forward, draw = self._manager.forward(layout), self._manager.sampler(layout, variant)
        self.gaps.look()
        # A numpy array is copied to the device by the call itself, in less than half of device_put's time.
        self._cache, logits, sampling = forward(self._manager.weights, self._cache, self._last_token, packed)
        if plan.constrained:
            logits = self._manager.mask(layout)(logits, pack_masks(plan, layout.rows, self._manager.vocab_size))
        token_ids, self._last_token = draw(logits, self._last_token, sampling, self._key)
        self.gaps.dispatched(cast(Result, token_ids))  # jax's types leave is_ready out
        token_ids.copy_to_host_async()
        return PendingStep(plan, token_ids)

    def collect(self, step: PendingStep) -> list[int]:
        """Wait for a step and return what each of its rows sampled."""
        ids: list[int] = np.asarray(step.token_ids)[: step.plan.num_rows].tolist()
        self.gaps.look()
        return ids
