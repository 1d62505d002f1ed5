"""Which of the tokens that a step sampled are the text.

Each position's token is sampled as it would be without drafts: with its own random numbers, and
from logits behind the tokens that were fed. It is the text's if all drafts fed before it are the
tokens that were sampled in their places. So the text is the same as without drafts, whatever the
parameters, as far as logits do not depend on the number of rows.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from engine.sampling.sampler_inputs import SamplerInputs
from engine.scheduling.sequence import NO_DRAFT
from engine.speculation.drafter import Drafter
from engine.speculation.history import History

NOT_TEXT = -2
"""Instead of a token id: the row's token stands behind a draft that was wrong."""
OF_EARLIER = 64
"""Added to a number of drafts: they are of earlier texts."""


Verify = Callable[[Array, SamplerInputs, History, Drafter], tuple[Array, History]]
"""``verify``, or what a backend has in its place."""


def verify(sampled: Array, inputs: SamplerInputs, history: History, drafter: Drafter) -> tuple[Array, History]:
    """i32[2, rows] the tokens, or NOT_TEXT, and of each sequence's first row the number of drafts
    that it has now, or may have, perhaps with OF_EARLIER; and the history with both.

    ``sampled`` are i32[rows] of ``sample``. Rows of one sequence stand together, in the order of
    their positions.
    """
    slots, positions = inputs.slots, inputs.rows.positions
    samples = slots != inputs.dump_slot
    right = (inputs.rests > 0) & (sampled >= 0) & (sampled == history.draft(slots, positions))
    wrong = jnp.cumsum(~right, dtype=jnp.int32) - (~right).astype(jnp.int32)
    first = jnp.arange(len(slots), dtype=jnp.int32) - inputs.offsets
    kept = samples & (wrong == wrong[first])
    num_new = _sums(kept, slots, history.num_new)
    num_wrong = _sums(samples & ~kept, slots, history.num_wrong)
    mine = jnp.where(kept, slots, inputs.dump_slot)
    ids = history.ids.at[mine, positions].set(jnp.maximum(sampled, 0))

    firsts = jnp.where(inputs.offsets == 0, slots, inputs.dump_slot)
    lengths = positions + num_new[slots]
    drafts, are_earlier = drafter.drafts(ids, firsts, lengths, inputs.looks_up)
    places = lengths[:, None] + jnp.arange(history.num_drafts, dtype=jnp.int32)[None, :]
    ids = ids.at[firsts[:, None], jnp.minimum(places, ids.shape[1] - 1)].set(drafts)
    counts = jnp.sum(drafts != NO_DRAFT, axis=1, dtype=jnp.int32) + OF_EARLIER * are_earlier.astype(jnp.int32)
    result = jnp.stack([jnp.where(kept, sampled, NOT_TEXT), counts])
    return result, History(ids, num_new, num_wrong, history.num_drafts)


def _sums(counted: Array, slots: Array, before: Array) -> Array:
    """i32[slots] how many of each slot's rows are counted; as before where a slot has no row."""
    return before.at[slots].set(0).at[slots].add(counted.astype(jnp.int32))
