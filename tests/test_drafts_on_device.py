"""The device's part of speculation against plain twins: looking drafts up, and verifying them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.sampler_inputs import PARAMETERS, SamplerInputs, pack_inputs
from engine.speculation.drafter import drafter_of
from engine.speculation.history import DRAFTED_LATER, NO_DRAFT, new_history
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.speculative_config import SpeculativeConfig
from engine.speculation.verification import NOT_TEXT, verify

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
    found, _ = _look_up(jnp.asarray(ids), jnp.asarray([len(tokens) for tokens in rows]), COUNT, shortest, longest)

    assert found.tolist() == [plain_look_up(tokens, COUNT, shortest, longest) for tokens in rows]


def plain_look_up_in_all(own, earlier, count, shortest, longest):
    """The longest run wins, and the sequence's own of equal ones; what an earlier text says ends with it."""
    for size in range(longest, shortest - 1, -1):
        if len(own) >= size and plain_look_up(own, count, size, size)[0] != NO_DRAFT:
            return plain_look_up(own, count, size, size)
        tail = own[len(own) - size :]
        for end in range(len(earlier) - 2, size - 2, -1):
            if len(tail) == size and earlier[end - size + 1 : end + 1] == tail and earlier[end + 1] != NO_DRAFT:
                left = [*earlier[end + 1 :], NO_DRAFT]
                drafts = left[: left.index(NO_DRAFT)][:count]
                return drafts + [NO_DRAFT] * (count - len(drafts))
    return [NO_DRAFT] * count


def _longest_run(own, tokens, longest):
    """Of the last tokens of a row, those that something follows in a text."""
    ends = range(1, len(tokens))
    runs = [
        size
        for size in range(1, longest + 1)
        for end in ends
        if own[-size:] == tokens[max(0, end - size) : end] and size <= len(own) and tokens[end] != NO_DRAFT
    ]
    return max(runs, default=0)


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH),
            st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=3),
        ),
        min_size=3,
        max_size=3,
    ),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
)
def test_earlier_texts_are_looked_in_as_if_they_were_said_before(rows, sizes):
    """Each row in its own; a run does not go from one text to another, or on behind the row's tokens."""
    earlier = [[token for text in texts for token in (*text, NO_DRAFT)] for _, texts in rows]
    ids = np.full((len(rows), 2 * WIDTH + 4), NO_DRAFT, np.int32)
    for row, (own, _) in enumerate(rows):
        ids[row, : len(own)] = own
        ids[row, len(own) : WIDTH] = own[0]
        ids[row, WIDTH : WIDTH + len(earlier[row])] = earlier[row]

    lengths = jnp.asarray([len(own) for own, _ in rows])
    found, are_earlier = _look_up(jnp.asarray(ids), lengths, COUNT, *sizes, WIDTH + 4)

    both = [(own, texts) for (own, _), texts in zip(rows, earlier, strict=True)]
    assert found.tolist() == [plain_look_up_in_all(own, texts, COUNT, *sizes) for own, texts in both]
    runs_in = [[_longest_run(own, tokens, sizes[1]) for tokens in (own, texts)] for own, texts in both]
    assert are_earlier.tolist() == [sizes[0] <= there > here for here, there in runs_in]


@pytest.mark.parametrize(
    ("tokens", "drafts"), [([7, 8, 9, 7], [8, 9, 7, 8, 9]), ([4, 4, 4], [4] * 5), ([1, 2], [-1] * 5)]
)
def test_what_goes_round_is_drafted_as_a_loop(tokens, drafts):
    """Though its last round is cut off by the end of the text."""
    ids = jnp.asarray([tokens + [0] * (WIDTH - len(tokens))])

    assert _look_up(ids, jnp.asarray([len(tokens)]), COUNT, 1, 3)[0].tolist() == [drafts]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("looks", [True, False])
def test_tokens_are_kept_up_to_the_first_wrong_draft_and_there_are_drafts_behind_them(method, looks):
    """Slot 0 was fed its last token and two drafts, of which the second is wrong; slot 1 samples behind its prompt. A
    step that does not look n-grams up leaves none of the drafts before."""
    keys = {"prompt_lookup_min": 1} if method == "ngram" else {"model": "small"}
    config = SpeculativeConfig(method=method, num_speculative_tokens=2, **keys)
    history = new_history(3, 20, config.num_speculative_tokens, 0)
    ids = history.ids.at[0, :6].set(jnp.asarray([5, 6, 7, 5, 6, 9], jnp.int32)).at[1, :2].set(3)
    history = replace(history, ids=ids)
    slots, lens = np.array([0, 0, 0, 1, 2], np.int32), np.array([4, 5, 6, 2, 0], np.int32)
    offsets, rests = np.array([0, 1, 2, 0, 0], np.int32), np.array([2, 1, 0, 0, 0], np.int32)
    yes = np.array([1, 1, 1, 1, 0], np.int32)
    looks_up = np.full(5, looks, np.int32)
    packed = pack_inputs(slots, yes, yes, lens, jnp.zeros((len(PARAMETERS), 3), jnp.int32), offsets, rests, looks_up)

    sampled = jnp.asarray([6, 7, 8, 4, 1], jnp.int32)
    verified = jax.jit(lambda *given: verify(given[0], SamplerInputs.unpack(given[1], 3), given[2], drafter_of(config)))
    (tokens, counts), after = verified(sampled, packed, history)

    assert tokens.tolist()[:4] == [6, 7, NOT_TEXT, 4]
    assert after.num_new.tolist()[:2] == [2, 1] and after.num_wrong.tolist()[:2] == [1, 0]
    none = [NO_DRAFT] * 2
    drafts = [[5, 6] if looks else none, none] if method == "ngram" else [[DRAFTED_LATER] * 2] * 2
    assert after.ids[0, :8].tolist() == [5, 6, 7, 5, 6, 7, *drafts[0]]
    assert after.ids[1, :5].tolist() == [3, 3, 4, *drafts[1]]
    assert counts.tolist()[0] == (2 if looks or method == "draft_model" else 0)
    assert counts.tolist()[3] == (0 if method == "ngram" else 2)


_look_up = jax.jit(
    lambda ids, lengths, count, shortest, longest, earlier=0: PromptLookup(count, shortest, longest, earlier).drafts(
        ids.astype(jnp.int32),
        jnp.arange(len(ids), dtype=jnp.int32),
        lengths.astype(jnp.int32),
        jnp.asarray(True),
    ),
    static_argnums=(2, 3, 4, 5),
)
