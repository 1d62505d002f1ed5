"""Bias, bans, penalties, temperature and cuts against transformers' own processors and warpers: equal to 1e-5.

``scripts/make_sampling_goldens`` writes the cases: every parameter alone, and random combinations.
"""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.sampling.logit_bias import apply_bias, bias_of, neutral_bias
from engine.sampling.new_tokens import last_sampled
from engine.sampling.penalties import apply_penalties, neutral_penalties, penalties_of
from engine.sampling.sampler import SamplingRows, cuts_of
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "sampling.json").read_text())
CASES, END = GOLDEN["cases"], GOLDEN["end"]
SLOT, SLOTS = 2, 4
"""The slot that the sequence under test has; the last is the dump slot."""


def build_sequence(case, output):
    """The sequence of a case, with this much of its output landed."""
    params = dict(case["params"])
    bad_words = tuple(map(tuple, params.pop("bad_words", ())))
    if "logit_bias" in params:
        params["logit_bias"] = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
    sequence = Sequence(
        "a", case["prompt"], SamplingParams(**params), frozenset({END}), 99, seed=0, bad_word_token_ids=bad_words
    )
    sequence.output_token_ids = output
    return sequence


@cache
def compiled():
    """The functions of a step, and the states of all slots as they are when nothing runs."""
    vocab = len(CASES[0]["logits"])
    states = [
        jax.tree.map(lambda leaf: jnp.tile(leaf, (SLOTS, *(1 for _ in leaf.shape))), row)
        for row in (neutral_bias(vocab), neutral_penalties(vocab))
    ]
    return (
        *states,
        jax.jit(write),
        jax.jit(apply_bias),
        jax.jit(apply_penalties),
        jax.jit(lambda logits, rows: cuts_of(logits, jnp.max(logits, axis=-1), rows).weigh(logits)),
    )


def write(state, row):
    """The states with a sequence's in its slot."""
    return jax.tree.map(lambda slots, values: slots.at[SLOT].set(values), state, row)


def probabilities(case, landed):
    """What the token after a case's output is drawn from, all but the first ``landed`` tokens of it known to the device only.

    Two rows of other slots are beside it.
    """
    bias, penalties, write, add_bias, penalize, to_weights = compiled()
    sequence = build_sequence(case, case["output"][:landed])
    vocab = len(case["logits"])
    bias, penalties = write(bias, bias_of(sequence, vocab)), write(penalties, penalties_of(sequence, vocab))
    slots = np.array([SLOTS - 1, SLOT, 0], np.int32)
    last_token = np.array([5, 6, 0, 7], np.int32)
    for count in range(landed, len(case["output"]) + 1):
        if count > landed:
            last_token[SLOT] = case["output"][count - 1]
        logits = np.tile(np.array(case["logits"], np.float32), (3, 1))
        num_tokens = np.array([count + 1, len(case["prompt"]) + count, count + 1], np.int32)
        decodes = np.array([True, count > landed, True])
        new = last_sampled(jnp.array(last_token.copy()), jnp.array(slots), jnp.array(decodes))
        bias, logits = add_bias(logits, bias, slots, new, num_tokens)
        penalties, logits = penalize(logits, penalties, slots, new)
    neighbours = np.asarray(logits)[[0, 2]]
    assert (neighbours == np.asarray(case["logits"], np.float32)).all()
    weights = np.asarray(to_weights(logits, rows_of(sequence.params))[1], np.float64)
    return weights / weights.sum()


def rows_of(params):
    """Parameters of three rows alike."""
    columns = [params.temperature, params.top_k, params.top_p, params.min_p]
    kinds = [np.float32, np.int32, np.float32, np.float32]
    return SamplingRows(
        *(np.full(3, value, kind) for value, kind in zip(columns, kinds, strict=True)),
        seeds=np.zeros(3, np.uint32),
        positions=np.zeros(3, np.int32),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(case["params"]) or "nothing")
def test_distributions_equal_those_of_transformers(case):
    """The probabilities a token is drawn from, whether the output has landed or is known to the device alone."""
    for landed in (len(case["output"]), 0):
        np.testing.assert_allclose(probabilities(case, landed), case["probabilities"], atol=1e-5)


def test_the_goldens_hold_every_parameter_and_its_effect():
    """No parameter is missing, and some bans of several tokens and some hidden ends were met."""
    named = {name for case in CASES for name in case["params"]}
    assert named == {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    }  # fmt: skip
    banned = [case for case in CASES if "bad_words" in case["params"] and case["output"][-1:] == [11]]
    hidden = [case for case in CASES if case["params"].get("min_tokens", 0) > len(case["output"])]
    assert banned and hidden
    assert all(case["probabilities"][12] == 0 for case in banned)
    assert all(case["probabilities"][END] == 0 for case in hidden)
