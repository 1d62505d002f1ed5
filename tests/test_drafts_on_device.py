"""The device's part of speculation against plain twins: looking drafts up, and verifying them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.history import NO_DRAFT
from engine.speculation.prompt_lookup import look_up

COUNT, WIDTH = 5, 24


def plain_look_up(tokens, count, shortest, longest):
    """The latest of the longest runs that occur before, and what follows it, over and over."""
    for size in range(longest, shortest - 1, -1):
        tail = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 2, size - 2, -1):
            if len(tail) == size and tokens[end - size + 1 : end + 1] == tail:
                followed = tokens[end + 1 :]
                return [followed[index % len(followed)] for index in range(count)]
    return [NO_DRAFT] * count


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4), (3, 5)]),
)
def test_drafts_are_what_followed_the_latest_of_the_longest_runs(rows, sizes):
    """What lies behind a row's tokens does not count."""
    shortest, longest = sizes
    ids = np.full((len(rows), WIDTH), NO_DRAFT, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        ids[row, len(tokens) :] = tokens[0]
    found = _look_up(jnp.asarray(ids), jnp.asarray([len(tokens) for tokens in rows]), COUNT, shortest, longest)

    assert found.tolist() == [plain_look_up(tokens, COUNT, shortest, longest) for tokens in rows]


@pytest.mark.parametrize(
    ("tokens", "drafts"), [([7, 8, 9, 7], [8, 9, 7, 8, 9]), ([4, 4, 4], [4] * 5), ([1, 2], [-1] * 5)]
)
def test_what_goes_round_is_drafted_as_a_loop(tokens, drafts):
    """Though its last round is cut off by the end of the text."""
    ids = jnp.asarray([tokens + [0] * (WIDTH - len(tokens))])

    assert _look_up(ids, jnp.asarray([len(tokens)]), COUNT, 1, 3).tolist() == [drafts]


_look_up = jax.jit(
    lambda ids, lengths, count, shortest, longest: look_up(
        ids.astype(jnp.int32), lengths.astype(jnp.int32), count=count, shortest=shortest, longest=longest
    ),
    static_argnums=(2, 3, 4),
)
