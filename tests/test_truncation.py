"""What top-k, top-p and min-p keep, against a reference that sorts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import truncation
from engine.sampling.logit_floors import REMOVED
from engine.sampling.truncation import WEIGHTLESS, Scale, lowest_kept
from engine.vocabulary import WHOLE

VOCAB = 40


def reference(logits, top_k, top_p, min_p):
    """bool[vocab] of one row: sort, cut, and keep whatever equals the last one kept."""
    logits = np.asarray(logits, np.float32) + np.float32(0)
    ordered = np.sort(logits)[::-1]
    kth = ordered[min(top_k, len(ordered)) - 1] if top_k else -np.inf
    weights = np.where(logits >= kth, np.exp(logits.astype(np.float64) - ordered[0]), 0)
    crossing = -np.inf
    if top_p < 1:
        crossing = next(value for value in ordered if weights[logits >= value].sum() >= top_p * weights.sum())
    floor = ordered[0] + np.log(min_p) if min_p else -np.inf
    return (logits >= kth) & (logits >= crossing) & (logits >= floor) & (logits - ordered[0] > WEIGHTLESS)


def keeps(logits, *parameters):
    """bool[rows, vocab] whether each row keeps a token of f32[rows, vocab]."""
    best = jnp.max(logits, axis=-1)
    below = logits - best[:, None]
    lowest = lowest_kept(logits, Scale(best, jnp.ones_like(best)), *parameters, WHOLE)
    return (below >= lowest[:, None]) & (below > WEIGHTLESS)


@cache
def compiled(backend, top):
    """``keeps`` for three rows, as on this backend, with so many likeliest tokens looked at first."""
    shapes = [(3, VOCAB), (3,), (3,), (3,)]
    dtypes = [np.float32, np.int32, np.float32, np.float32]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.lax, "platform_dependent", lambda *x, cpu, default: (cpu if backend == "cpu" else default)(*x)
        )
        patch.setattr(truncation, "TOP", top)
        lowered = jax.jit(keeps).lower(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    return lowered.compile()


def column(values, dtype):
    """A value for each row."""
    return jnp.asarray(np.asarray(values, dtype))


# Powers of two, so that probabilities are sums of such too, and a top_p in between is never met by a hair.
logits = st.lists(
    st.sampled_from([0.0, -0.0, *(float(n * np.log(2)) for n in (-9, -3, -2, -1, 1, 2, 3)), REMOVED, -np.inf]),
    min_size=VOCAB - 1,
    max_size=VOCAB - 1,
).map(lambda values: [*values, 0.0])


@pytest.mark.parametrize(
    ("backend", "top"),
    [
        ("cpu", 3),
        ("tpu", 3),
        pytest.param("cpu", VOCAB, marks=pytest.mark.thorough),
        pytest.param("tpu", VOCAB, marks=pytest.mark.thorough),
    ],
)
@given(
    rows=st.lists(
        st.tuples(
            logits,
            st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 1]),
            st.sampled_from([1e-6, 0.1234567, 0.5432109, 0.9191919, 1.0]),
            st.sampled_from([0.0, 0.3, 1.0]),
        ),
        min_size=3,
        max_size=3,
    )
)
def test_each_row_keeps_what_a_sort_would(backend, top, rows):
    """Whether the cut is among the likeliest or beyond, with ties, removed tokens and zeros of both signs, alone and all together; the same on a CPU and elsewhere."""
    logits, top_k, top_p, min_p = zip(*rows, strict=True)

    kept = compiled(backend, top)(
        column(logits, np.float32), column(top_k, np.int32), column(top_p, np.float32), column(min_p, np.float32)
    )

    for row, mask in zip(rows, np.asarray(kept), strict=True):
        assert mask.tolist() == reference(*row).tolist()


def test_a_large_vocabulary_is_cut_where_its_probabilities_say():
    """Of 100,000 tokens, top_p keeps the fewest whose probabilities reach it."""
    logits = np.random.default_rng(0).normal(0, 2, (1, 100_000)).astype(np.float32)
    probabilities = np.sort(np.exp(logits[0].astype(np.float64)))[::-1] / np.exp(logits[0].astype(np.float64)).sum()

    kept = jax.jit(keeps)(
        jnp.asarray(logits), column([0], np.int32), column([0.9], np.float32), column([0], np.float32)
    )

    assert abs(int(kept.sum()) - (np.searchsorted(np.cumsum(probabilities), 0.9) + 1)) <= 1
