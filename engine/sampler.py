"""From logits to the next token of each row.

Order: temperature, top-k, top-p (keeps the token that crosses p), min-p, draw. Each row follows its own parameters,
whatever its neighbours do; a row at temperature 0 is the argmax.
"""

from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

REMOVED = -1e30
"""Logit of a token that may not be drawn."""


class SamplingVariant(Enum):
    """What the rows of a step need; each is compiled apart, so that a greedy step pays for nothing else."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated"
    """Some row uses top-k, top-p or min-p."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The parameters of each row, [rows]; a padding row is all zeros, which is greedy."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    positions: Array
    """The place in its sequence of the token to be drawn."""


def sample(logits: Array, rows: SamplingRows, key: Array, variant: SamplingVariant) -> Array:
    """i32[rows] token ids drawn from f32[rows, vocab] logits; ``key`` is the engine's."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if variant is SamplingVariant.GREEDY:
        return best
    greedy = rows.temperature <= 0
    # From the best on down, so that no temperature, however small, makes it infinite or puts it below REMOVED.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(greedy, np.float32(1), rows.temperature)[:, None]
    if variant is SamplingVariant.TRUNCATED:
        scaled = truncate(scaled, rows)
    drawn = jnp.argmax(scaled + _noise(rows, key, logits.shape[-1]), axis=-1).astype(jnp.int32)
    return jnp.where(greedy, best, drawn)


def truncate(scaled: Array, rows: SamplingRows) -> Array:
    """Logits f32[rows, vocab] with the tokens outside top-k, top-p and min-p removed.

    Tokens equal to the last one kept are kept too. top-p weighs what top-k has left; min-p is relative to the best.
    """
    vocab = scaled.shape[-1]
    ordered = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    count = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ordered, count[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, REMOVED)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The sum may round up to 1 before the last token: a row without top-p keeps all of them whatever it says.
    crossing = (before < rows.top_p[:, None]) | (rank == 0) | (rows.top_p >= 1)[:, None]
    last_kept = jnp.min(jnp.where(crossing, ordered, jnp.inf), axis=-1, keepdims=True)
    floor = ordered[:, :1] + jnp.log(rows.min_p)[:, None]
    return jnp.where(scaled >= jnp.maximum(jnp.maximum(kth, last_kept), floor), scaled, REMOVED)


def _noise(rows: SamplingRows, key: Array, vocab: int) -> Array:
    """Gumbel noise f32[rows, vocab]: argmax of logits plus it is a draw (Gumbel 1954), and the same for a seed and
    position whatever else runs."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, seed), position), (vocab,), jnp.float32)

    return jax.vmap(one)(rows.seeds, rows.positions)
