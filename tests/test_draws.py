"""Draws by seed, through the whole engine: the same tokens in any company."""

import jax
import pytest
from checkpoints import build_checkpoint

from engine.build import build_engine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

NUM_PAGES = 15
"""Enough for one sequence at its longest, too few for all at once."""


@pytest.fixture
def start_engine(tmp_path, monkeypatch):
    """Starts a small engine, as often as asked, that compiles once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = build_checkpoint(tmp_path / "model")
    config = EngineConfig(
        model=directory, max_num_seqs=4, max_num_batched_tokens=7, page_size=3, num_pages=NUM_PAGES, max_model_len=40
    )
    yield lambda: build_engine(config, lambda progress: None)
    jax.config.update("jax_compilation_cache_dir", None)


def build_sequence(name, *, seed, prompt=5, **params):
    """A sequence of twenty tokens drawn at temperature 1."""
    return Sequence(name, [7] * prompt, SamplingParams(**params), frozenset(), 20, seed)


def build_sequences():
    """Two of the same seed, one of another, one beyond 2**31, a truncated and a greedy one: prompts of several lengths."""
    return [
        build_sequence("first", seed=1),
        build_sequence("twin", seed=1),
        build_sequence("other", seed=2),
        build_sequence("high", seed=2**32 - 1, prompt=9),
        build_sequence("truncated", seed=3, prompt=14, top_k=9, top_p=0.9, min_p=0.01),
        build_sequence("greedy", seed=4, prompt=2, temperature=0),
    ]


def run(engine, sequences):
    """Serve these together; the tokens of each."""
    tokens = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def test_a_seed_draws_the_same_tokens_alone_in_company_preempted_and_after_a_restart(start_engine):
    """Seed and position decide, not row, neighbours, chunks, preemption or the process; another seed draws others."""
    engine = start_engine()
    alone = {}
    for sequence in build_sequences():
        alone |= run(engine, [sequence])
    assert engine.stats().preemptions == 0

    together = run(engine, build_sequences())
    restarted = run(start_engine(), build_sequences()[::-1])

    assert engine.stats().preemptions > 0
    assert together == alone == restarted
    assert alone["first"] == alone["twin"] != alone["other"]
