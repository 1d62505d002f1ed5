"""Presence, frequency and repetition penalties.

The device counts the tokens of each slot that has penalties, so that a token in flight counts too.
A row of counts is written when a sequence gets its slot, also after preemption. The last row is
the dump slot's and penalises nothing.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.new_tokens import NewTokens
from engine.scheduling.sequence import Sequence
from engine.vocabulary import WHOLE, Vocabulary

IN_PROMPT = 1
GENERATED = 2
"""A token's count is IN_PROMPT if the prompt has it, plus GENERATED each time it is generated."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """Numpy arrays of one sequence; on the device with an axis of slots first, dump slot last."""

    counts: Any
    """i32[vocab] IN_PROMPT if the prompt has the token, plus GENERATED per generation."""
    presence: Any
    frequency: Any
    repetition: Any
    """f32[] each."""


def needs_penalties(sequence: Sequence) -> bool:
    """Whether a sequence has penalties."""
    params = sequence.params
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def neutral_penalties(vocab_size: int) -> Penalties:
    """The state that penalises nothing."""
    return _penalties(np.zeros(vocab_size, np.int32), 0.0, 0.0, 1.0)


def penalties_of(sequence: Sequence, vocab_size: int) -> Penalties:
    """The state of a sequence at its present tokens; none may be in flight."""
    counts = GENERATED * np.bincount(sequence.output_token_ids, minlength=vocab_size).astype(np.int32)
    counts[sequence.prompt_token_ids] += IN_PROMPT
    params = sequence.params
    return _penalties(counts, params.presence_penalty, params.frequency_penalty, params.repetition_penalty)


def apply_penalties(
    logits: Array,
    state: Penalties,
    slots: Array,
    new: NewTokens,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Penalties, Array]:
    """The state with the tokens that are new, and the penalised logits f32[rows, vocab].

    Arguments are those of ``apply_bias``. Repetition divides positive logits and multiplies
    negative ones (Keskar et al. 2019). Then frequency is subtracted per generation of a token
    and presence once, as in OpenAI's API.
    """
    part = logits.shape[-1]
    places = jnp.where(new.are_there, vocabulary.place(jnp.maximum(new.ids, 0), part), np.int32(part))
    counts = state.counts.at[new.owners[:, None], places].add(GENERATED, mode="drop")
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    row = state.counts[slots].at[rows, places].add(GENERATED, mode="drop")
    repetition = jnp.where(row > 0, state.repetition[slots][:, None], np.float32(1))
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = (row // GENERATED).astype(jnp.float32)
    logits -= state.frequency[slots][:, None] * times
    logits -= state.presence[slots][:, None] * (times > 0).astype(jnp.float32)
    return replace(state, counts=counts), logits


def _penalties(counts: np.ndarray, presence: float, frequency: float, repetition: float) -> Penalties:
    return Penalties(
        counts=counts,
        presence=np.array(presence, np.float32),
        frequency=np.array(frequency, np.float32),
        repetition=np.array(repetition, np.float32),
    )
