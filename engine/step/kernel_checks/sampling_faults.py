"""What is wrong with what a CPU computes between logits and tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from engine.sampling import cpu_sampler
from engine.sampling.cpu_sampler import CPU_SAMPLING
from engine.sampling.logit_bias import LogitBias, neutral_bias
from engine.sampling.logit_floors import MASKED_OUT, REMOVED
from engine.sampling.logprobs import num_columns, unpack_logprobs
from engine.sampling.needs import Need
from engine.sampling.penalties import GENERATED, Penalties, neutral_penalties
from engine.sampling.sampler_inputs import NUM_FIELDS, PARAMETERS, SamplerInputs
from engine.step.kernel_checks.tolerance import difference


def sampling_fault() -> str | None:
    """Of what is between logits and tokens on a CPU. Raises KernelsUnavailable."""
    cpu_sampler.prepare()
    return _changes_fault() or _draw_fault()


def _changes_fault() -> str | None:
    """Of what changes logits before a draw, for a row that fills no whole vectors."""
    random, vocab, new, banned = np.random.default_rng(0), 83, 81, 82
    logits, values = random.standard_normal((2, vocab)).astype(np.float32)
    bias, penalties = neutral_bias(vocab), neutral_penalties(vocab)
    bias.values[:], bias.banned_ids[0], bias.banned_after[0, -1] = values, banned, new
    penalties.counts[:] = random.integers(0, 7, vocab)
    penalties = replace(penalties, presence=np.float32(0.5), frequency=np.float32(0.25), repetition=np.float32(1.5))
    counts = penalties.counts + GENERATED * (np.arange(vocab) == new)
    repeated = np.where(counts > 0, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    expected = {
        "bias": np.where(np.arange(vocab) == banned, REMOVED, logits + values),
        "penalties": repeated - 0.25 * (counts // GENERATED) - 0.5 * (counts >= GENERATED),
        "mask": np.where(np.arange(vocab) % 3, logits, MASKED_OUT),
        "count of tokens": counts,
    }
    masks = np.packbits(np.arange(96) % 3 > 0, bitorder="little").view(np.int32)[None]
    packed = np.zeros((NUM_FIELDS, 1), np.int32)
    packed[1:3] = 1  # it samples, and decodes
    packed[NUM_FIELDS - len(PARAMETERS) + [*PARAMETERS].index("needs")] = Need.BIAS | Need.PENALTIES

    def computed(logits: jax.Array, bias: LogitBias, penalties: Penalties, packed: jax.Array) -> list[jax.Array]:
        inputs, fed = SamplerInputs.unpack(packed, num_slots=2), jnp.asarray([new, 0], np.int32)
        _, biased = CPU_SAMPLING.apply_bias(logits, bias, inputs, fed)
        after, penalized = CPU_SAMPLING.apply_penalties(logits, penalties, inputs, fed)
        return [biased, penalized, CPU_SAMPLING.mask_logits(logits, jnp.asarray(masks)), after.counts]

    states = [jax.tree.map(lambda leaf: np.stack([leaf, leaf]), state) for state in (bias, penalties)]
    results = jax.jit(computed)(logits[None], *states, packed)
    return difference(expected, [found[0] for found in map(np.asarray, results)])


DRAWS = {
    "temperature": (0, 1, 1, 2, 1, 1, 1),
    "top_k": (0, 0, 0, 0, 5, 0, 0),
    "top_p": (1, 1, 1, 1, 1, 0.3, 1),
    "min_p": (0, 0, 0, 0, 0, 0, 0.4),
    "seeds": (0, 0, 2**32 - 1, 2, 3, 4, 2),
}
"""Rows of the same logits that each ask for something else, without which their token would be another."""
DRAWN = (30, 281, 221, 78, 60, 221, 68)
"""What ``sampler.sample`` draws for them, which takes seconds to compile. No random number is within a
thousandth of another token's, so that rounding makes no difference."""


def _draw_fault() -> str | None:
    """Of greedy and drawn tokens, and their log-probabilities, in a few blocks of tokens and a part of
    one, of which several are as likely as the best."""
    places = np.arange(300)
    logits = (places * 37 % 101 / 16).astype(np.float32)
    packed = np.zeros((NUM_FIELDS, len(DRAWN)), np.int32)
    packed[0], packed[1], packed[3] = np.arange(len(DRAWN)), 1, 7  # slots, which sample behind 7 tokens
    for number, (name, dtype) in enumerate(PARAMETERS.items(), NUM_FIELDS - len(PARAMETERS)):
        packed[number] = np.array(DRAWS.get(name, 0), dtype).view(np.int32)

    def computed(logits: jax.Array, packed: jax.Array, last: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        inputs = SamplerInputs.unpack(packed, num_slots=len(last))
        tokens, last = CPU_SAMPLING.draw(logits, inputs, last, jax.random.wrap_key_data(key))
        return tokens, last, CPU_SAMPLING.compute_logprobs(logits, tokens)

    alike, last = np.broadcast_to(logits, (len(DRAWN), len(logits))), np.zeros(len(DRAWN) + 1, np.int32)
    *tokens, logprobs = map(np.asarray, jax.jit(computed)(alike, packed, last, np.array([1, 2], np.uint32)))
    likeliest = np.argsort(-logits, kind="stable")[: num_columns(len(logits)) // 2 - 1]
    every = logits - np.log(np.exp(logits).sum())
    rows = [unpack_logprobs(row, token, len(likeliest)) for row, token in zip(logprobs, DRAWN, strict=True)]
    expected = {
        "draw": np.array(DRAWN),
        "last token": np.array([*DRAWN, 0]),
        "log-probability": np.array([every[[token, *likeliest]] for token in DRAWN]),
        "rank": np.array([1 + (logits > logits[token]).sum() for token in DRAWN]),
        "likeliest token": np.array([[token, *likeliest] for token in DRAWN]),
    }
    of_rows = ([row.logprobs for row in rows], [row.ranks[0] for row in rows], [row.token_ids for row in rows])
    return difference(expected, [*tokens, *map(np.array, of_rows)])
