"""What a backend has between logits and tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling import logit_bias, penalties, sampler
from engine.sampling.logit_bias import LogitBias
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.needs import Need
from engine.sampling.new_tokens import NewTokens, last_sampled
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import SamplingRows
from engine.sampling.sampler_inputs import SamplerInputs
from engine.sampling.token_masks import mask_logits
from engine.speculation.history import History
from engine.vocabulary import WHOLE, Vocabulary

Fed = Array | History
"""What decoding rows are fed: the token that each slot sampled last, or all tokens where rows have drafts."""
State = TypeVar("State", LogitBias, Penalties)


class Sampler(Protocol):
    """``sample``, or what a backend has in its place."""

    def __call__(self, logits: Array, inputs: SamplerInputs, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
        """See ``sample``."""


class Draw(Protocol):
    """``draw``, or what a backend has in its place."""

    def __call__(
        self, logits: Array, inputs: SamplerInputs, last_token: Array, key: Array, vocabulary: Vocabulary = WHOLE
    ) -> tuple[Array, Array]:
        """See ``draw``."""


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


class Change(Protocol[State]):
    """``apply_bias`` or ``apply_penalties``, or what a backend has in its place."""

    def __call__(
        self, logits: Array, state: State, inputs: SamplerInputs, fed: Fed, vocabulary: Vocabulary = WHOLE
    ) -> tuple[State, Array]:
        """The state of all slots with the tokens that are new, and the changed logits f32[rows, vocab]."""


class Mask(Protocol):
    """``mask_logits``, or what a backend has in its place."""

    def __call__(self, logits: Array, masks: Array, vocabulary: Vocabulary = WHOLE) -> Array:
        """See ``mask_logits``."""


class WriteSlot(Protocol):
    """``write_slot``, or what a backend has in its place."""

    def __call__(self, state: State, slot: Array, row: State) -> State:
        """See ``write_slot``."""


def sample(logits: Array, inputs: SamplerInputs, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """``sampler.sample`` for the rows of a step, i32[rows]."""
    return sampler.sample(logits, inputs.rows, key, vocabulary)


def draw(
    logits: Array, inputs: SamplerInputs, last_token: Array, key: Array, vocabulary: Vocabulary = WHOLE
) -> tuple[Array, Array]:
    """``sample``, and the token that each slot sampled last, i32[slots]."""
    token_ids = sample(logits, inputs, key, vocabulary)
    return token_ids, kept(token_ids, inputs, last_token)


def kept(token_ids: Array, inputs: SamplerInputs, last_token: Array) -> Array:
    """The token that each slot sampled last, i32[slots], with i32[rows] that a step samples."""
    return last_token.at[inputs.slots].set(jnp.maximum(token_ids, 0))  # no NO_TOKEN


def apply_bias(
    logits: Array, state: LogitBias, inputs: SamplerInputs, fed: Fed, vocabulary: Vocabulary = WHOLE
) -> tuple[LogitBias, Array]:
    """``logit_bias.apply_bias`` for the rows of a step that need it."""
    slots, new = inputs.slots_that(Need.BIAS), _new_tokens(inputs, fed, Need.BIAS)
    return logit_bias.apply_bias(logits, state, slots, new, inputs.rows.positions, vocabulary)


def apply_penalties(
    logits: Array, state: Penalties, inputs: SamplerInputs, fed: Fed, vocabulary: Vocabulary = WHOLE
) -> tuple[Penalties, Array]:
    """``penalties.apply_penalties`` for the rows of a step that need it."""
    slots, new = inputs.slots_that(Need.PENALTIES), _new_tokens(inputs, fed, Need.PENALTIES)
    return penalties.apply_penalties(logits, state, slots, new, vocabulary)


def write_slot(state: State, slot: Array, row: State) -> State:
    """The state of all slots with that of a sequence in its slot i32[]."""
    written: State = jax.tree.map(lambda slots, value: slots.at[slot].set(value), state, row)
    return written


def _new_tokens(inputs: SamplerInputs, fed: Fed, need: Need) -> NewTokens:
    """What the states of rows that have this need do not know yet."""
    slots = inputs.slots_that(need)
    if not isinstance(fed, History):
        return last_sampled(fed, slots, inputs.decodes)
    owners = jnp.where(inputs.offsets == 0, slots, np.int32(inputs.dump_slot))
    return fed.new_tokens(inputs.slots, owners, inputs.decodes, inputs.offsets, inputs.rows.positions)


@dataclass(frozen=True)
class SamplingOperations:
    """XLA's by default."""

    sample: Sampler = sample
    draw: Draw = draw
    compute_logprobs: ComputeLogprobs = compute_logprobs
    apply_bias: Change[LogitBias] = apply_bias
    apply_penalties: Change[Penalties] = apply_penalties
    mask_logits: Mask = mask_logits
    write_slot: WriteSlot = write_slot
    has_greedy: bool = True
    """Whether ``sampler.greedy`` takes less time than ``sample`` where all rows are greedy."""
    copies_counts: bool = True
    """Whether ``apply_penalties`` may have those of all slots twice, and once more its rows'."""

    def choose(self, rows: SamplingRows, draw: Callable[[], Array], greedy: Callable[[], Array]) -> Array:
        """What ``draw`` gives, which samples, or ``greedy`` where that does for all rows and is faster."""
        if not self.has_greedy:
            return draw()
        chosen: Array = jax.lax.cond(jnp.any(rows.temperature > 0), draw, greedy)
        return chosen


XLA_SAMPLING = SamplingOperations()
