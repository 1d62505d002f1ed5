"""The compiled functions between logits and tokens, and what they keep on the device for each slot.

A step calls the sampler, and the others only if one of its rows needs them: bias, penalties, masks, sampler, log-probabilities,
in this order. Each is compiled for every number of rows that a bucket has.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.logit_bias import LogitBias, apply_bias, neutral_bias
from engine.logprobs import compute_logprobs
from engine.lowering import lower
from engine.model_io import StepLayout
from engine.penalties import Penalties, apply_penalties, neutral_penalties
from engine.sampler import SamplingVariant, sample
from engine.token_masks import mask_logits, mask_words

Sample = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(logits, last_token, sampling, key) -> (ids i32[rows], last_token); last_token is donated."""
Bias = Callable[[LogitBias, Array, Array, Array], tuple[LogitBias, Array]]
"""(state, logits, last_token, sampling) -> (state, logits); the state is donated."""
Penalize = Callable[[Penalties, Array, Array, Array], tuple[Penalties, Array]]
"""As Bias."""
Mask = Callable[[Array, NDArray[np.int32]], Array]
"""``mask_logits``."""
Logprobs = Callable[[Array, Array], Array]
"""(logits, ids) -> what ``unpack_logprobs`` reads."""

State = TypeVar("State", LogitBias, Penalties)
Write = Callable[[State, np.int32, State], State]
"""(state of all slots, slot, a sequence's) -> state; the state is donated."""


class SamplingFunctions:
    """Compiles ahead of time; executables refuse other shapes than their own."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._num_slots = max_num_seqs + 1
        self.vocab_size = vocab_size
        self._sample: dict[tuple[int, SamplingVariant], Sample] = {}
        self._bias: dict[int, Bias] = {}
        self._penalize: dict[int, Penalize] = {}
        self._mask: dict[int, Mask] = {}
        self._logprobs: dict[int, Logprobs] = {}
        self.write_bias = self._writer(neutral_bias(vocab_size))
        self.write_penalties = self._writer(neutral_penalties(vocab_size))

    def sampler(self, layout: StepLayout, variant: SamplingVariant) -> Sample:
        """Draws a token for each of a bucket's rows."""
        return self._sample[layout.rows, variant]

    def bias(self, layout: StepLayout) -> Bias:
        """Applies LogitBias to a bucket's rows."""
        return self._bias[layout.rows]

    def penalize(self, layout: StepLayout) -> Penalize:
        """Applies Penalties to a bucket's rows."""
        return self._penalize[layout.rows]

    def mask(self, layout: StepLayout) -> Mask:
        """Applies the masks of constraints to a bucket's rows."""
        return self._mask[layout.rows]

    def logprobs(self, layout: StepLayout) -> Logprobs:
        """Finds the log-probabilities of the tokens drawn for a bucket's rows."""
        return self._logprobs[layout.rows]

    def new_bias(self) -> LogitBias:
        """The state of all slots, which changes nothing yet."""
        return self._of_all_slots(neutral_bias(self.vocab_size))

    def new_penalties(self) -> Penalties:
        """The state of all slots, which penalises nothing yet."""
        return self._of_all_slots(neutral_penalties(self.vocab_size))

    def is_compiled(self, layout: StepLayout) -> bool:
        """Whether all functions are there for a bucket."""
        return all((layout.rows, variant) in self._sample for variant in SamplingVariant) and all(
            layout.rows in functions for functions in (self._bias, self._penalize, self._mask, self._logprobs)
        )

    def jobs(self, layout: StepLayout) -> Iterator[Callable[[], None]]:
        """What is not compiled for a bucket, each to be called, on whatever thread."""
        for variant in SamplingVariant:
            if (layout.rows, variant) not in self._sample:
                yield partial(self._compile_sampler, layout, variant)
        for functions, job in (
            (self._bias, self._compile_bias),
            (self._penalize, self._compile_penalize),
            (self._mask, self._compile_mask),
            (self._logprobs, self._compile_logprobs),
        ):
            if layout.rows not in functions:
                yield partial(job, layout)

    def _compile_sampler(self, layout: StepLayout, variant: SamplingVariant) -> None:
        def draw(logits: Array, last_token: Array, sampling: Array, key: Array) -> tuple[Array, Array]:
            slots, rows = layout.unpack_sampling(sampling)
            token_ids = sample(logits, rows, key, variant)
            return token_ids, last_token.at[slots].set(jnp.maximum(token_ids, 0))  # NO_TOKEN is no row to look up

        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = lower(draw, *self._arguments(layout), key, donate=1)
        self._sample[layout.rows, variant] = lowered.compile()

    def _compile_bias(self, layout: StepLayout) -> None:
        def bias(state: LogitBias, logits: Array, last_token: Array, sampling: Array) -> tuple[LogitBias, Array]:
            slots, num_tokens = layout.take(sampling, "bias_slots"), layout.take(sampling, "kv_lens")
            return apply_bias(logits, state, slots, last_token, num_tokens)

        state = self._abstract(neutral_bias(self.vocab_size))
        self._bias[layout.rows] = lower(bias, state, *self._arguments(layout), donate=0).compile()

    def _compile_penalize(self, layout: StepLayout) -> None:
        def penalize(state: Penalties, logits: Array, last_token: Array, sampling: Array) -> tuple[Penalties, Array]:
            slots, num_tokens = layout.take(sampling, "penalty_slots"), layout.take(sampling, "kv_lens")
            return apply_penalties(logits, state, slots, last_token, num_tokens)

        state = self._abstract(neutral_penalties(self.vocab_size))
        lowered = lower(penalize, state, *self._arguments(layout), donate=0)
        self._penalize[layout.rows] = lowered.compile()

    def _compile_mask(self, layout: StepLayout) -> None:
        masks = jax.ShapeDtypeStruct((layout.rows, mask_words(self.vocab_size)), np.int32)
        self._mask[layout.rows] = lower(mask_logits, self._arguments(layout)[0], masks).compile()

    def _compile_logprobs(self, layout: StepLayout) -> None:
        logits, token_ids = self._arguments(layout)[0], jax.ShapeDtypeStruct((layout.rows,), np.int32)
        self._logprobs[layout.rows] = lower(compute_logprobs, logits, token_ids).compile()

    def _writer(self, row: State) -> Write[State]:
        def write(state: State, slot: Array, row: State) -> State:
            written: State = jax.tree.map(lambda slots, value: slots.at[slot].set(value), state, row)
            return written

        slot = jax.ShapeDtypeStruct((), np.int32)
        writer: Write[State] = lower(write, self._abstract(row), slot, row, donate=0).compile()
        return writer

    def _arguments(self, layout: StepLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Logits, last tokens and what the sampler reads of the packed array."""
        return (
            jax.ShapeDtypeStruct((layout.rows, self.vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((self._num_slots,), np.int32),
            jax.ShapeDtypeStruct((layout.sampling_size,), np.int32),
        )

    def _of_all_slots(self, row: State) -> State:
        state: State = jax.tree.map(lambda leaf: jnp.tile(leaf, (self._num_slots, *(1 for _ in leaf.shape))), row)
        return state

    def _abstract(self, row: State) -> State:
        state: State = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self._num_slots, *leaf.shape), leaf.dtype), row
        )  # fmt: skip
        return state
