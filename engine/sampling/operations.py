"""What a backend has between logits and tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from engine.sampling.logprobs import compute_logprobs
from engine.sampling.sampler import SamplingRows, sample
from engine.vocabulary import WHOLE, Vocabulary


class Sampler(Protocol):
    """``sampler.sample``, or what a backend has in its place."""

    def __call__(
        self,
        logits: Array,
        rows: SamplingRows,
        key: Array,
        vocabulary: Vocabulary = WHOLE,
    ) -> Array:
        """See ``sampler.sample``."""


class ComputeLogprobs(Protocol):
    """``compute_logprobs``, or what a backend has in its place."""

    def __call__(
        self,
        logits: Array,
        token_ids: Array,
        vocabulary: Vocabulary = WHOLE,
        vocab_size: int | None = None,
    ) -> Array:
        """See ``compute_logprobs``."""


@dataclass(frozen=True)
class SamplingOperations:
    """XLA's by default."""

    sample: Sampler = sample
    compute_logprobs: ComputeLogprobs = compute_logprobs
    has_greedy: bool = True
    """Whether ``sampler.greedy`` takes less time than ``sample`` where all rows are greedy."""

    def choose(self, rows: SamplingRows, draw: Callable[[], Array], greedy: Callable[[], Array]) -> Array:
        """What ``draw`` gives, which samples, or ``greedy`` where that does for all rows and is faster."""
        if not self.has_greedy:
            return draw()
        chosen: Array = jax.lax.cond(jnp.any(rows.temperature > 0), draw, greedy)
        return chosen


XLA_SAMPLING = SamplingOperations()
