"""Changes of a row's logits by logit_bias, allowed_token_ids, bad_words and min_tokens.

The device has a row of state per slot, written when a sequence that needs one gets the slot. The
last row is the dump slot's: it changes nothing, for rows that need nothing. The tokens that begin
bad words are on the device too, as the last may be in flight when the next step is planned.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.request_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, MOST_EOS_TOKEN_IDS
from engine.sampling.logit_floors import NOT_ALLOWED, REMOVED
from engine.sampling.new_tokens import NewTokens
from engine.scheduling.sequence import Sequence
from engine.vocabulary import WHOLE, Vocabulary

MAX_BANS = 3 * MAX_BAD_WORDS
"""Bad words of several tokens, each as it is spelt at the start of a text, after a space, and behind other text."""
MAX_HIDDEN = MAX_STOP_TOKEN_IDS + MOST_EOS_TOKEN_IDS
"""Ids that end a sequence: the request's, and the model's."""
RECENT = MAX_BAD_WORD_TOKENS - 1
ANY = -1
"""At the front of a ban's prefix: any token."""
NONE = -2
"""Before the first generated token: no token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitBias:
    """Numpy arrays of one sequence; on the device with an axis of slots first, dump slot last.

    Ids at or above the vocabulary's size stand for none.
    """

    values: Any
    """f32[vocab], added to the logits."""
    recent: Any
    """i32[RECENT] the last tokens generated, the newest last."""
    banned_ids: Any
    """i32[MAX_BANS] tokens, each removed after the tokens ..."""
    banned_after: Any
    """i32[MAX_BANS, RECENT] ... of this row."""
    hidden_ids: Any
    """i32[MAX_HIDDEN] tokens, removed while the sequence is shorter than ..."""
    hidden_until: Any
    """i32[] ... this many tokens."""


def needs_bias(sequence: Sequence) -> bool:
    """Whether a sequence's logits change in any of these ways."""
    params = sequence.params
    return bool(
        params.logit_bias or params.allowed_token_ids is not None or sequence.bad_word_token_ids or params.min_tokens
    )


def neutral_bias(vocab_size: int) -> LogitBias:
    """The state that changes nothing."""
    return LogitBias(
        values=np.zeros(vocab_size, np.float32),
        recent=np.full(RECENT, NONE, np.int32),
        banned_ids=np.full(MAX_BANS, vocab_size, np.int32),
        banned_after=np.full((MAX_BANS, RECENT), ANY, np.int32),
        hidden_ids=np.full(MAX_HIDDEN, vocab_size, np.int32),
        hidden_until=np.zeros((), np.int32),
    )


def bias_of(sequence: Sequence, vocab_size: int) -> LogitBias:
    """The state of a sequence at its present tokens; none may be in flight."""
    row = neutral_bias(vocab_size)
    params, output = sequence.params, sequence.output_token_ids[-RECENT:]
    if output:
        row.recent[-len(output) :] = output
    if params.allowed_token_ids is not None:
        row.values[:] = NOT_ALLOWED
        row.values[params.allowed_token_ids] = 0
    if params.logit_bias:
        row.values[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    _ban(row, sequence.bad_word_token_ids)
    if params.min_tokens:
        hidden = [*sequence.stop_token_ids, *sequence.ignored_token_ids]
        row.hidden_ids[: len(hidden)] = hidden
        row.hidden_until[...] = len(sequence.prompt_token_ids) + params.min_tokens
    return row


def _ban(row: LogitBias, words: tuple[tuple[int, ...], ...]) -> None:
    longer = 0
    for *prefix, last in words:
        if prefix:
            row.banned_ids[longer] = last
            row.banned_after[longer, -len(prefix) :] = prefix
            longer += 1
        elif row.values[last] > REMOVED:
            row.values[last] = REMOVED


def apply_bias(
    logits: Array,
    state: LogitBias,
    slots: Array,
    new: NewTokens,
    num_tokens: Array,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[LogitBias, Array]:
    """The state with the tokens that are new, and the changed logits f32[rows, vocab].

    ``slots`` i32[rows] are the dump slot for rows that need nothing. ``num_tokens`` i32[rows] are
    the tokens before the one to sample.
    """
    places = jnp.arange(RECENT, dtype=jnp.int32)[None, :]
    back = RECENT - 1 - places
    known = jnp.take_along_axis(state.recent[slots], jnp.minimum(places + new.counts[:, None], RECENT - 1), axis=1)
    recent = jnp.where(back < new.counts[:, None], new.at(back), known)
    after = state.banned_after[slots]
    meets = jnp.all((after == ANY) | (after == recent[:, None, :]), axis=-1)
    part = logits.shape[-1]
    vocab_size = np.int32(vocabulary.length(logits))
    banned = jnp.where(meets, state.banned_ids[slots], vocab_size)
    hides = num_tokens < state.hidden_until[slots]
    hidden = jnp.where(hides[:, None], state.hidden_ids[slots], vocab_size)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    biased = logits + state.values[slots]
    # Minimum, so that a token that is not allowed stays below a banned one.
    struck = vocabulary.place(jnp.concatenate([banned, hidden], axis=1), part)
    biased = biased.at[rows, struck].min(REMOVED, mode="drop")
    return replace(state, recent=state.recent.at[new.owners].set(recent)), biased
