"""Draws by seed, through the whole engine: the same tokens in any company."""

import itertools

import pytest
from checkpoints import build_checkpoint

from engine.build import build_engine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

NUM_PAGES = 15
"""Enough for one sequence at its longest, too few for all at once."""
ROOMY = {"max_num_batched_tokens": 6, "num_pages": 99, "staged_readiness": True}
"""Every step in the largest bucket, the one that is compiled at first."""


@pytest.fixture
def start_engine(tmp_path):
    """Starts a small engine, as often as asked."""
    directory = build_checkpoint(tmp_path / "model", num_hidden_layers=1)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "page_size": 3, "num_pages": NUM_PAGES}
    return lambda **changed: build_engine(
        EngineConfig(model=directory, max_model_len=40, **{**settings, **changed}), lambda progress: None
    )


def build_sequence(name, *, seed, prompt=5, bad_words=(), **params):
    """A sequence of twenty tokens drawn at temperature 1; the last two ids of the vocabulary end it."""
    return Sequence(
        name, [7] * prompt, SamplingParams(**params), frozenset({142, 143}), 20, seed, bad_word_token_ids=bad_words
    )


def build_sequences():
    """Two of the same seed, one of another, one beyond 2**31, a truncated and a greedy one: prompts of several lengths."""
    return [
        build_sequence("first", seed=1),
        build_sequence("twin", seed=1),
        build_sequence("other", seed=2),
        build_sequence("high", seed=2**32 - 1, prompt=9),
        build_sequence("truncated", seed=3, prompt=14, top_k=9, top_p=0.9, min_p=0.01),
        build_sequence("greedy", seed=4, prompt=2, temperature=0),
        build_sequence("counted", seed=5, temperature=0, presence_penalty=2, frequency_penalty=2, prompt=8),
        build_sequence("repetitive", seed=6, temperature=0.5, repetition_penalty=0.2, prompt=11),
        build_sequence("banned", seed=7, top_k=2, bad_words=tuple((a, b) for a in range(70) for b in (3, 5, 9))),
        build_sequence("allowed", seed=8, allowed_token_ids=[1, 2, 142, 143], min_tokens=15, logit_bias={142: 9.0}),
        build_sequence("told", seed=9, logprobs=3, prompt_logprobs=2, prompt=13),
    ]


def run(engine, sequences):
    """Serve these together; the tokens of each."""
    tokens = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    assert engine.stats().pages_owned == 0 and engine.stats().compilations_after_ready == 0
    return tokens


@pytest.mark.parametrize(
    "roomy",
    [
        ROOMY,
        pytest.param({"max_num_seqs": 12, "max_num_batched_tokens": 32, "num_pages": 99}, marks=pytest.mark.thorough),
    ],
    ids=["4 rows", "12 rows"],
)
def test_a_seed_draws_the_same_tokens_alone_in_company_preempted_and_after_a_restart(start_engine, roomy):
    """Seed and position decide, not row, neighbours, chunks, preemption or the process; another seed draws others.

    What depends on the tokens so far (penalties, bad words, min_tokens) does so whoever knows them, host or device.
    """
    engine = start_engine()
    alone = {}
    for sequence in build_sequences():
        alone |= run(engine, [sequence])
    assert engine.stats().preemptions == 0

    together = run(engine, build_sequences())
    restarted = run(start_engine(), build_sequences()[::-1])
    roomier = run(start_engine(**roomy, run_ahead=3), build_sequences())

    assert engine.stats().preemptions > 0
    assert together == alone == restarted == roomier
    assert alone["first"] == alone["twin"] != alone["other"]


def test_parameters_show_in_the_tokens(start_engine):
    """Through the whole engine: nothing banned or hidden comes, what is penalised comes once, allowed ids alone come."""
    engine = start_engine()
    tokens = run(engine, build_sequences())
    plain = run(
        engine,
        [
            build_sequence("counted", seed=5, temperature=0, prompt=8),
            build_sequence("repetitive", seed=6, temperature=0.5, prompt=11),
        ],
    )

    variety = {name: (len(set(plain[name])), len(set(tokens[name]))) for name in plain}
    assert variety["counted"][0] < variety["counted"][1]
    assert variety["repetitive"][0] > variety["repetitive"][1]
    assert not any(a < 70 and b in (3, 5, 9) for a, b in itertools.pairwise(tokens["banned"]))
    assert set(tokens["allowed"][:15]) <= {1, 2} and tokens["allowed"][15:] == [142]


def build_samples(count, **params):
    """``count`` samples of one prompt, as prepare inputs makes them."""
    return [build_sequence(f"sample {index}", seed=20 + index, prompt=14, **params) for index in range(count)]


def test_samples_of_one_prompt_share_its_pages_and_draw_as_they_would_alone(start_engine):
    """The prompt is computed once, but for its last page; tokens are those of the same seeds apart, preempted or not."""
    params = {"presence_penalty": 1.0, "min_tokens": 3}
    roomy = start_engine(**ROOMY)
    apart = {}
    for sample in build_samples(4, **params):
        sample.salt = sample.request_id.encode()
        apart |= run(roomy, [sample])
    computed = roomy.stats().prompt_tokens
    together = run(roomy, build_samples(4, **params))
    tight = start_engine()
    preempted = run(tight, build_samples(4, **params))

    assert computed == 4 * 14 and roomy.stats().prompt_tokens - computed == 14 + 3 * 2
    assert tight.stats().preemptions > 0
    assert apart == together == preempted
    assert len({tuple(tokens) for tokens in together.values()}) > 1
