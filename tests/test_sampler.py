"""The sampler: each row by its own parameters, the draw by seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.sampler import REMOVED, SamplingRows, SamplingVariant, argmax, sample, truncate

KEY = jax.random.key(0)


def build_rows(count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    """Parameters of ``count`` rows; a scalar is for all of them."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (count,)))

    return SamplingRows(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seeds=column(np.arange(count) if seeds is None else seeds, np.uint32),
        positions=column(0 if positions is None else positions, np.int32),
    )


def build_logits(rows=1, vocab=50, seed=0):
    """Random logits with a spread like a model's."""
    return jnp.asarray(np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32))


def kept_tokens(logits, **params):
    """Which tokens of one row survive truncation."""
    scaled = truncate(jnp.asarray([logits], jnp.float32), build_rows(1, **params))
    return np.flatnonzero(np.asarray(scaled[0]) > REMOVED).tolist()


def test_greedy_rows_are_argmax_beside_sampled_ones():
    """temperature 0 is the argmax of its row, whatever its neighbours do (an ancestor gave them the worst token)."""
    logits = build_logits(rows=6)
    rows = build_rows(6, temperature=[0, 1, 0, 5, 0, 1], top_k=[0, 3, 2, 0, 0, 0], top_p=0.7)

    for variant in SamplingVariant:
        ids = sample(logits, rows, KEY, variant)
        greedy = np.asarray([0, 2, 4])
        assert ids[greedy].tolist() == jnp.argmax(logits, axis=-1)[greedy].tolist()


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
def test_the_best_token_is_the_first_of_equals(vocab):
    """As argmax is everywhere, in vocabularies of any size and where logits are the least that there is."""
    rng = np.random.default_rng(vocab)
    logits = np.concatenate([rng.integers(-3, 3, (9, vocab)), np.full((1, vocab), -np.inf)]).astype(np.float32)

    assert argmax(jnp.asarray(logits)).tolist() == np.argmax(logits, axis=-1).tolist()


def test_top_k_keeps_the_k_best():
    """top_k=2 leaves two tokens; 0 and more than the vocabulary leave all."""
    assert kept_tokens([1, 4, 2, 3], top_k=2) == [1, 3]
    assert kept_tokens([1, 4, 2, 3], top_k=0) == kept_tokens([1, 4, 2, 3], top_k=99) == [0, 1, 2, 3]


def test_top_p_keeps_the_token_that_crosses():
    """Of 0.5, 0.3, 0.2 a top_p of 0.6 keeps two, of 0.5 and less the best one alone."""
    logits = np.log([0.2, 0.5, 0.3])

    assert kept_tokens(logits, top_p=0.6) == [1, 2]
    assert kept_tokens(logits, top_p=0.45) == [1]
    assert kept_tokens(logits, top_p=1e-6) == [1]
    assert kept_tokens(logits, top_p=1.0) == [0, 1, 2]


def test_top_p_weighs_what_top_k_has_left():
    """After top_k=2 of 0.4, 0.3, 0.3-ish the best has 4/7 of the mass, so top_p 0.5 keeps it alone."""
    assert kept_tokens(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2, top_p=0.5) == [0]
    assert kept_tokens(np.log([0.4, 0.3, 0.2, 0.1]), top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_best():
    """min_p=0.5 keeps tokens at least half as likely as the best."""
    assert kept_tokens(np.log([0.4, 0.25, 0.19, 0.16]), min_p=0.5) == [0, 1]


@pytest.mark.parametrize("variant", [SamplingVariant.TEMPERATURE, SamplingVariant.TRUNCATED])
def test_the_smallest_temperatures_draw_the_best_token(variant):
    """Whatever the height of the logits, next to no temperature is the argmax, never what truncation removed."""
    logits = jnp.concatenate([build_logits(rows=20) + np.float32(height) for height in (-50, 0, 50)])
    temperature = np.resize([1e-8, 1e-29, 1e-37, 1e-44], 60)
    truncation = {"top_k": np.resize([1, 0, 0, 0, 0], 60), "top_p": np.resize([1, 1, 0.9], 60), "min_p": 0.01}

    ids = sample(logits, build_rows(60, temperature=temperature, **truncation), KEY, variant)

    assert ids.tolist() == jnp.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("variant", [SamplingVariant.TEMPERATURE, SamplingVariant.TRUNCATED])
def test_draws_follow_the_distribution(variant):
    """Over many seeds the frequencies are the softmax of logits over temperature (chi-square, fixed seeds)."""
    logits, draws = build_logits(vocab=8) / np.float32(3), 4000

    ids = sample(jnp.repeat(logits, draws, axis=0), build_rows(draws, temperature=0.8), KEY, variant)

    expected = np.asarray(jax.nn.softmax(logits[0] / np.float32(0.8)), np.float64) * draws
    observed = np.bincount(np.asarray(ids), minlength=8)
    # 99.9 % quantile of chi-square with 7 degrees of freedom.
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_a_draw_depends_on_seed_and_position_alone():
    """The same seed and position draw the same token in any row and company; another position draws afresh."""
    logits = build_logits()
    alone = sample(logits, build_rows(1, seeds=5, positions=9), KEY, SamplingVariant.TEMPERATURE)
    crowd = sample(
        jnp.concatenate([build_logits(rows=3, seed=1), logits]),
        build_rows(4, seeds=[1, 2, 3, 5], positions=[1, 2, 3, 9], top_k=[4, 0, 0, 0]),
        KEY,
        SamplingVariant.TRUNCATED,
    )
    elsewhere = sample(
        jnp.repeat(logits, 40, axis=0), build_rows(40, seeds=5, positions=np.arange(40)), KEY, SamplingVariant.TEMPERATURE
    )  # fmt: skip

    assert int(crowd[3]) == int(alone[0]) == int(elsewhere[9])
    assert len(set(elsewhere.tolist())) > 3
