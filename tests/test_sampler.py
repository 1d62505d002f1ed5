"""The sampler: each row by its own parameters, the draw by seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kernels_needed import kernels_needed

from engine.sampling import cpu_sampler, sampler
from engine.sampling.logit_floors import MASKED_OUT
from engine.sampling.row_blocks import BLOCK, in_blocks, top
from engine.sampling.sampler import SamplingRows
from engine.sampling.sampler_inputs import SamplerInputs, pack_inputs
from engine.sampling.truncation import TOP
from engine.vocabulary import WHOLE

VOCABULARIES = {"Llama 3": 128_256, "Qwen 2": 152_064}

KEY = jax.random.key(0)
greedy = jax.jit(sampler.greedy)
weigh = jax.jit(lambda logits, rows: sampler.cuts_of(logits, jnp.max(logits, axis=-1), rows).weigh(logits))
choose = jax.jit(jax.vmap(sampler.choose, in_axes=(None, 1)))


def sample_by_kernel(logits, rows, key):
    """``cpu_sampler.sample`` of rows that sample, each in a slot of its own."""
    slots = jnp.arange(len(logits), dtype=jnp.int32)
    columns = [rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, jnp.zeros_like(slots)]
    parameters = jnp.stack([jax.lax.bitcast_convert_type(column, jnp.int32) for column in columns])
    packed = pack_inputs(slots, jnp.ones_like(slots), jnp.zeros_like(slots), rows.positions, parameters)
    return cpu_sampler.sample(logits, SamplerInputs.unpack(packed, len(logits) + 1), key)


def prepare_kernel():
    """Where there is none, the test is skipped."""
    with kernels_needed():
        cpu_sampler.prepare()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(sampler.sample, id="XLA", marks=pytest.mark.thorough),
        pytest.param(sample_by_kernel, id="kernel"),
    ],
)
def sample(request):
    """The sampler of XLA's operations, and the CPU's own, of which a test below shows that it draws the same."""
    if request.param is sample_by_kernel:
        prepare_kernel()
    return jax.jit(request.param)


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


MIXED = build_rows(6, temperature=[0, 1, 1, 0, 1, 1], top_k=[9, 9, 9, 9, 99, 0], top_p=[1, 1, 0.9, 1, 1, 0.99])


def kept_tokens(logits, **params):
    """Which tokens of one row survive truncation."""
    weights = weigh(jnp.asarray([logits], jnp.float32), build_rows(1, **params))
    return np.flatnonzero(np.asarray(weights[0])).tolist()


def kept_by_sorting(logits, top_k, top_p, min_p):
    """The same of f64[vocab], the plain way; None where a sum comes so close to top_p that rounding may decide."""
    order = np.argsort(-logits, kind="stable")
    kept = logits >= logits[order[min(top_k, len(logits)) - 1]] if top_k else np.full(len(logits), True)
    weights = np.where(kept, np.exp(logits - logits.max()), 0)
    before = np.cumsum(weights[order]) - weights[order]
    if top_p < 1:
        if (np.abs(before - top_p * weights.sum()) < 1e-4 * weights.sum()).any():
            return None
        kept &= logits >= logits[order][before < top_p * weights.sum()].min()
    return np.flatnonzero(kept & (weights >= min_p)).tolist()


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "mixed"])
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_have_theirs(sample, is_greedy):
    """NaN or infinity anywhere in a row gives NO_TOKEN in its place."""
    function = greedy if is_greedy else lambda logits: sample(logits, MIXED, KEY)
    logits = build_logits(rows=6, vocab=300)
    expected = np.asarray(function(logits)).copy()
    expected[[1, 3]] = sampler.NO_TOKEN

    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, 127, 128, 299):
            spoilt = np.asarray(logits).copy()
            spoilt[[1, 3], place] = value
            assert function(spoilt).tolist() == expected.tolist()


def test_greedy_rows_are_argmax_beside_sampled_ones(sample):
    """temperature 0 is the argmax of its row, whatever its neighbours do (an ancestor gave them the worst token)."""
    logits = build_logits(rows=6, vocab=300)
    rows = build_rows(6, temperature=[0, 1, 0, 5, 0, 1], top_k=[0, 3, 2, 0, 0, 0], top_p=0.7)
    best = jnp.argmax(logits, axis=-1)

    ids = sample(logits, rows, KEY)

    assert ids[::2].tolist() == best[::2].tolist()
    assert sample(logits, build_rows(6, temperature=0), KEY).tolist() == greedy(logits).tolist() == best.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000])
def test_the_best_token_is_the_first_of_equals(vocab):
    """As argmax is everywhere, in vocabularies of any size and where logits are the least that there is."""
    rng = np.random.default_rng(vocab)
    logits = np.concatenate([rng.integers(-3, 3, (9, vocab)), np.full((1, vocab), MASKED_OUT)]).astype(np.float32)

    assert greedy(logits).tolist() == np.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [6, 1000, 1024])
def test_the_likeliest_are_those_of_a_sort_the_first_of_equals_first(vocab, ties):
    """Of vocabularies of one block of tokens, of more blocks than are asked for, and of a last one that is not full."""
    logits = np.random.default_rng(vocab).normal(size=(9, vocab)).astype(np.float32)
    logits = np.round(logits) + np.float32(0) if ties else logits  # -0 is below 0 to a device
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :6]

    high, ids = jax.jit(lambda logits: top(in_blocks(logits), 6, WHOLE))(logits)

    assert ids.tolist() == order.tolist()
    assert np.array_equal(high, np.take_along_axis(logits, order, axis=-1))


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


@pytest.mark.parametrize("truncated", [False, True])
def test_the_smallest_temperatures_draw_the_best_token(sample, truncated):
    """Whatever the height of the logits, next to no temperature is the argmax, never what truncation removed."""
    logits = jnp.concatenate([build_logits(rows=20, vocab=300) + np.float32(height) for height in (-50, 0, 50)])
    temperature = np.resize([1e-8, 1e-29, 1e-37, 1e-44], 60)
    truncation = {"top_k": np.resize([1, 0, 0, 0, 0], 60), "top_p": np.resize([1, 1, 0.9], 60), "min_p": 0.01}

    ids = sample(logits, build_rows(60, temperature=temperature, **(truncation if truncated else {})), KEY)

    assert ids.tolist() == jnp.argmax(logits, axis=-1).tolist()


def numbers_near_boundaries(weights):
    """Of the numbers that a uniform draw can be, those where a sum up to some place of f32[rows, n] is the share; f32[rows, m]."""
    sums = np.asarray(jax.jit(lambda weights: jnp.cumsum(weights, axis=-1))(weights), np.float64)
    steps = np.round(sums / sums[:, -1:] * 2**23)[..., None] + np.arange(-2, 3)
    return (np.clip(steps, 0, 2**23 - 1) / 2**23).reshape(len(weights), -1).astype(np.float32)


@pytest.mark.parametrize(
    "vocab",
    [
        pytest.param(VOCABULARIES["Llama 3"], id="Llama 3"),
        pytest.param(VOCABULARIES["Qwen 2"], id="Qwen 2", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    "share_of_zeros", [0.7, *(pytest.param(share, marks=pytest.mark.thorough) for share in (0.3, 0.99))]
)
def test_what_is_drawn_has_a_weight(vocab, share_of_zeros):
    """However a sum over many places rounds: also the numbers that lie as close to a boundary as a draw can."""
    rng, blocks = np.random.default_rng(vocab), -(-vocab // BLOCK)
    weights = np.exp(rng.normal(0, 3, (8, blocks))).astype(np.float32)
    weights[rng.random(weights.shape) < share_of_zeros] = 0
    weights[:, -1], weights[:, blocks // 2] = 0, 1
    weights[0], weights[1] = np.eye(2, blocks, dtype=np.float32)[0], np.eye(1, blocks, blocks - 1, dtype=np.float32)[0]

    places = np.asarray(choose(weights, numbers_near_boundaries(weights)))

    assert (weights[np.arange(8), places] > 0).all()


def test_a_draw_next_to_a_boundary_is_among_the_top_k(sample):
    """Of 128,256 tokens and top_k=20, one seed and position once drew a token that top_k had cut."""
    logits = jnp.asarray(
        (np.random.default_rng(1).normal(size=(45, VOCABULARIES["Llama 3"]))[44:] * 3).astype(np.float32)
    )
    rows = build_rows(1, top_k=20, seeds=1, positions=2607)

    drawn = int(sample(logits, rows, KEY)[0])

    assert drawn in jax.lax.top_k(logits[0], 20)[1].tolist()


@pytest.mark.parametrize("place", [0, 127, 128, 299])
@pytest.mark.parametrize(
    "truncation", [{"top_k": 1}, {"top_p": 1e-46}, {"top_p": 1e-7}, {"min_p": 1}, {"temperature": 1e-40}]
)
def test_a_token_that_alone_has_a_weight_is_drawn(sample, place, truncation):
    """Wherever it lies, and however narrow the parameters are."""
    logits = build_logits(vocab=300).at[:, place].set(20)
    rows = build_rows(60, seeds=np.arange(60), **truncation)

    drawn = sample(jnp.repeat(logits, 60, axis=0), rows, KEY)

    assert set(drawn.tolist()) == {place}


@pytest.mark.parametrize("truncated", [False, True])
def test_draws_follow_the_distribution(sample, truncated):
    """Over many seeds the frequencies are the softmax of logits over temperature (chi-square, fixed seeds)."""
    logits, draws = build_logits(vocab=8) / np.float32(3), 12000

    top_k = np.where(np.arange(draws) == 0, 1, 0) if truncated else 0  # of a neighbour, which is not counted
    ids = sample(jnp.repeat(logits, draws, axis=0), build_rows(draws, temperature=0.8, top_k=top_k), KEY)[1:]

    expected = np.asarray(jax.nn.softmax(logits[0] / np.float32(0.8)), np.float64) * (draws - 1)
    observed = np.bincount(np.asarray(ids), minlength=8)
    # 99.9 % quantile of chi-square with 7 degrees of freedom.
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_a_draw_depends_on_seed_and_position_alone(sample):
    """The same seed and position draw the same token in any row and company; another position draws afresh."""
    logits = build_logits(vocab=300)
    alone = sample(logits, build_rows(1, seeds=5, positions=9), KEY)
    crowd = sample(
        jnp.concatenate([build_logits(rows=5, vocab=300, seed=1), logits]),
        build_rows(6, seeds=[1, 2, 3, 4, 5, 5], positions=[1, 2, 3, 4, 5, 9], top_k=[4, 0, 0, 0, 0, 0]),
        KEY,
    )
    elsewhere = sample(
        jnp.repeat(logits, 40, axis=0), build_rows(40, seeds=5, positions=np.arange(40)), KEY
    )  # fmt: skip

    assert int(crowd[5]) == int(alone[0]) == int(elsewhere[9])
    assert len(set(elsewhere.tolist())) > 3


@given(
    seed=st.integers(0, 2**20),
    ties=st.booleans(),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 220)),
    top_p=st.sampled_from([0.013, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.037]),
)
def test_a_cut_is_where_sorting_finds_it(seed, ties, spread, top_k, top_p, min_p):
    """Flat and peaked rows, cuts among the likeliest tokens and beyond them, ties kept together: as by sorting."""
    logits = np.random.default_rng(seed).normal(0, spread, 3 * TOP).astype(np.float32)
    if ties:
        logits = np.round(logits)
    expected = kept_by_sorting(logits.astype(np.float64), top_k, top_p, min_p)
    assume(expected is not None)

    assert kept_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_draws_from_a_large_vocabulary_reach_every_part_of_it(sample):
    """Many blocks of tokens, the last one not full: each part is drawn as often as it weighs (chi-square, fixed seeds)."""
    vocab, draws, parts = 1000, 4000, 10
    logits = jnp.zeros((1, vocab)).at[0, -100:].set(np.log(3))

    ids = sample(jnp.repeat(logits, draws, axis=0), build_rows(draws), KEY)

    expected = np.array([1.0] * 9 + [3.0]) / 12 * draws
    observed = np.bincount(np.asarray(ids) // (vocab // parts), minlength=parts)
    # 99.9 % quantile of chi-square with 9 degrees of freedom.
    assert len(observed) == parts and ((observed - expected) ** 2 / expected).sum() < 27.9


def test_mixed_rows_are_each_drawn_from_their_own_distribution(sample):
    """Greedy, hot, truncated and plain rows side by side: argmax there, and each other kind as its own weights say."""
    logits, draws = build_logits(vocab=8, seed=3) / np.float32(3), 3000
    kinds = {
        "temperature": np.array([0, 1, 0.5, 1], np.float32),
        "top_k": np.array([0, 0, 0, 4]),
        "top_p": np.array([1, 1, 1, 0.9]),
    }
    mixed = {name: np.tile(values, draws) for name, values in kinds.items()}

    rows = build_rows(4 * draws, **mixed)
    ids = np.asarray(sample(jnp.repeat(logits, 4 * draws, axis=0), rows, KEY)).reshape(draws, 4)

    assert set(ids[:, 0]) == {int(jnp.argmax(logits))}
    for kind in (1, 2, 3):
        one = {name: values[kind] for name, values in kinds.items()}
        weights = np.asarray(weigh(logits, build_rows(1, **one))[0], np.float64)
        expected = weights / weights.sum() * draws
        observed = np.bincount(ids[:, kind], minlength=8)
        assert not observed[expected == 0].any()
        possible = expected > 0
        statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
        # 99.9 % quantile of chi-square with 7 degrees of freedom, more than any of these has.
        assert statistic < 24.3


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 7},
        {"top_k": 7, "top_p": 0.6},
        {"top_p": 0.05},
        {"min_p": 0.9},
        {"top_k": 39, "top_p": 0.9, "min_p": 0.8},
    ],
)
def test_all_that_a_cut_keeps_is_drawn_and_nothing_else(sample, params):
    """Of nearly equal tokens, over many seeds."""
    draws, logits = 600, np.random.default_rng(300).normal(0, 0.1, 300).astype(np.float32)
    expected = kept_by_sorting(logits.astype(np.float64), **{"top_k": 0, "top_p": 1, "min_p": 0.0} | params)

    ids = sample(jnp.repeat(jnp.asarray([logits]), draws, axis=0), build_rows(draws, **params), KEY)

    assert sorted(set(ids.tolist())) == expected


@pytest.mark.parametrize("vocab", [300, pytest.param(12_000, marks=pytest.mark.thorough)])
def test_the_kernel_draws_what_xla_draws(vocab):
    """The same tokens from the same seeds: flat rows and peaked ones, with ties and with masked tokens, whatever cuts there are,
    also those behind more tokens than the likeliest blocks have."""
    prepare_kernel()
    random, count = np.random.default_rng(vocab), 64
    logits = random.normal(0, random.choice([0.1, 3, 12], (count, 1)), (count, vocab)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[::4, random.integers(0, vocab, vocab // 2)] = MASKED_OUT
    choices = {
        "temperature": [0, 0.3, 1, 2, 1e-30],
        "top_k": [0, 0, 1, 40, 150, 5000],
        "top_p": [1, 1, 0.97, 0.5, 0.1, 0],
        "min_p": [0, 0, 0.01],
        "seeds": [0, 1, 2**31, 2**32 - 1],
        "positions": [0, 7, 131_071],
    }
    rows = build_rows(count, **{name: random.choice(values, count) for name, values in choices.items()})

    drawn = jax.jit(sample_by_kernel)(logits, rows, KEY)

    assert drawn.tolist() == jax.jit(sampler.sample)(logits, rows, KEY).tolist()
