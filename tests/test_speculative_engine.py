"""Drafts in the real engine: they change nothing of what a request is given, whatever its parameters, and only how many
steps that takes."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import build_checkpoint
from forced_tokens import ForcedTokens, MostTokens
from test_oengine import no_patience  # noqa: F401 - a fixture

from caching.page_manager import SINK_SLOT
from engine.build import build
from engine.config import EngineConfig
from engine.devices.device_errors import DeviceError
from engine.live.weight_source import WeightFiles
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput
from engine.step.execution_manager import ExecutionManager

SPECULATION = (
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1, '
    '"prompt_lookup_history": 140}'
)
MAX_MODEL_LEN, MAX_NUM_SEQS, MOST_DRAFTS = 96, 12, 4
SIZES = {
    "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 24, "page_size": 16,
}  # fmt: skip
CASES = {
    "one step ahead, few pages": ("llama2", {"num_pages": 14}),
    "no step ahead": ("qwen3", {"num_pages": 40, "run_ahead": 0}),
    "three steps ahead": ("llama2", {"num_pages": 30, "run_ahead": 3}),
    "windows": ("gemma3", {"num_pages": 120, "run_ahead": 2}),
    "latents": ("deepseek_v3_plain", {"num_pages": 20}),
    "experts": ("qwen3_moe", {"num_pages": 20}),
    "two devices": ("llama2", {"num_pages": 14, "tensor_parallel_size": 2}),
    "8-bit pages": ("llama2", {"num_pages": 14, "kv_cache_dtype": "int8", "quantization": "int8"}),
    "states of delta nets, one step ahead": ("qwen3_next", {"num_pages": 14}),
    "states of delta nets, no step ahead": ("qwen3_5", {"num_pages": 40, "run_ahead": 0}),
    "states of delta nets, three steps ahead": ("qwen3_next", {"num_pages": 30, "run_ahead": 3}),
    "states of Mamba-2, two devices": ("granite_hybrid", {"num_pages": 14, "tensor_parallel_size": 2}),
    "states of Mamba-2, a page each": ("nemotron_h", {"num_pages": 30, "page_size": 4}),
    "attention and Mamba-2 side by side": ("falcon_h1", {"num_pages": 20, "run_ahead": 2}),
    "states of short convolutions": ("lfm2", {"num_pages": 20, "run_ahead": 2}),
    "states beside windows": ("lfm3", {"num_pages": 40, "run_ahead": 2}),
    "XLA's attention": ("llama2", {"num_pages": 14, "attention_backend": "xla"}),
    "a table of positions": ("opt", {"num_pages": 14}),
    "a table of positions, two devices": ("opt", {"num_pages": 14, "tensor_parallel_size": 2, "quantization": "int8"}),
    "on the host": ("llama2", {"num_pages": 14, "run_ahead": 3, "page_size": 8, "host_cache_gib": 0.01}),
    "states on the host": ("nemotron_h", {"num_pages": 20, "run_ahead": 2, "page_size": 8, "host_cache_gib": 0.01}),
    "windows on the host": ("gemma3", {"num_pages": 100, "page_size": 4, "host_cache_gib": 0.01}),
}
EXHAUSTIVE = (
    "a table of positions, two devices",
    "experts",
    "8-bit pages",
    "states of delta nets, no step ahead",
    "states of delta nets, one step ahead",
    "states of Mamba-2, a page each",
    "on the host",
    "states on the host",
    "windows on the host",
)
"""What is tried once more in these, thorough runs have in others."""


def build_engine(model, speculation, **settings):
    """An engine whose steps are all of one size, so that less is compiled; drafts are granted whatever they cost."""

    def begin(served, decoders, shapes):
        shapes = replace(shapes, smallest_step=shapes.max_num_batched_tokens)
        manager = ExecutionManager(decoders.model, shapes, served.backend, served.mesh, draft=decoders.draft)
        manager.begin()
        return manager

    config = EngineConfig(model=str(model), speculative_config=speculation, **{**SIZES, **settings})
    engine = build(config, lambda _: None, lambda compiled: compiled.engine(), begin)
    if speculation:
        engine._scheduler.speculation._seconds = lambda _tokens, _passes: None
    return engine


def build_sequences(seed, count, vocabulary, constrained=(3,), salts=(b"", b"", b"another", None)):
    """Requests with every parameter that changes tokens, and some with masks that are late and force tokens, or say so.

    Their prompts go round in loops, and what has few tokens to choose among does so, too. Some ask for what one before
    has asked for.
    """
    rng, sequences = random.Random(seed), []
    for number in range(count):
        loop = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))]
        prompt = (loop * 20)[: rng.randint(2, 40)]
        params = SamplingParams(
            temperature=rng.choice([0, 0, 0.2, 1.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1, 0.5]),
            repetition_penalty=rng.choice([1, 1, 1.3]),
            frequency_penalty=rng.choice([0, 0, 0.5]),
            presence_penalty=rng.choice([0, 0, -0.5]),
            logit_bias=rng.choice([{}, {}, {rng.randrange(vocabulary): 4.0}]),
            allowed_token_ids=rng.choice([None, rng.sample(range(vocabulary), 3)])
            if number % 5 not in constrained
            else None,
            min_tokens=rng.choice([0, 5]),
            logprobs=rng.choice([None, None, 2]),
            num_speculative_tokens=rng.choice([None, None, None, 0, 2]),
        )
        words = tuple(tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 3))) for _ in range(4))
        stops = frozenset(rng.sample(range(vocabulary), 2))
        most = min(60, MAX_MODEL_LEN - len(prompt))
        kind = MostTokens if number % 10 == 8 else ForcedTokens
        asked = prompt, params, stops, rng.randint(5, most), rng.randrange(99), words
        if sequences and rng.random() < 0.4:
            asked = rng.choice(sequences[-4:])[1]
        constraint = kind(number % 3, vocabulary, MOST_DRAFTS) if number % 5 in constrained else None
        sequence = Sequence(str(number), *asked, salt=rng.choice(salts), constraint=constraint)
        sequences.append((sequence, asked))
    return [sequence for sequence, _ in sequences]


def answers(engine, sequences, *, at_once=5, between=lambda _: []):
    """By request: tokens, the ids of its log-probabilities, and how it ended. ``between`` steps something may happen, which
    may give outputs."""
    got = {sequence.request_id: ([], [], []) for sequence in sequences}
    waiting = list(sequences)
    while engine.has_work or waiting:
        outputs = between(engine)
        while waiting and len(engine.sequence_ids) < at_once:
            engine.add(waiting.pop(0))
        for output in outputs + engine.step():
            tokens, logprobs, ends = got[output.request_id]
            tokens += output.token_ids
            logprobs += [each.token_ids for each in output.logprobs]
            ends += [output.finish_reason] if output.finish_reason else []
        engine.check_integrity()
    return got


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.thorough)
        for name in CASES
    ],
)
def engines(request, tmp_path_factory):
    """Of one model, without drafts and with."""
    variant, settings = CASES[request.param]
    directory = build_checkpoint(tmp_path_factory.mktemp("speculation"), variant, max_position_embeddings=MAX_MODEL_LEN)
    return [build_engine(directory, config, **settings) for config in (None, SPECULATION)]


def test_every_request_is_given_the_same_with_drafts(engines):
    """Greedy and drawn, with penalties, bias, bad words, stops and log-probabilities, preempted and from prefixes."""
    plain, ours = engines
    expected = answers(plain, build_sequences(0, 12, plain.limits.vocab_size))
    ours.start_counting()

    got = answers(ours, build_sequences(0, 12, plain.limits.vocab_size))

    assert got == expected
    stats = ours.stats()
    assert stats.num_accepted_tokens > 15 and stats.num_draft_tokens > stats.num_accepted_tokens
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.compilations_after_ready == 0


def test_what_earlier_requests_said_is_drafted_for_those_that_share_it(engines):
    """A text that was given before takes few steps, also when its sequence is preempted; in the same slots nobody else has
    drafts of it."""
    plain, ours = engines
    params = SamplingParams(temperature=1.0)

    def requests(salts):
        prompts = [[number, 7 * number % 97, 5] for number in range(6)]
        return [
            Sequence(str(number), prompt, params, frozenset(), 30, number, salt=salt)
            for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True))
        ]

    own = [b"of %d" % number for number in range(6)]
    expected, accepted, earlier = answers(plain, requests(own)), [], []
    for salts in (own, own, [None] * 6):
        before = ours.stats()
        assert answers(ours, requests(salts)) == expected
        after = ours.stats()
        accepted.append(after.num_accepted_tokens - before.num_accepted_tokens)
        earlier.append(after.num_earlier_accepted_tokens - before.num_earlier_accepted_tokens)

    assert accepted[1] > 90 and max(accepted[0], accepted[2]) < 30  # of 174; with steps ahead not all are known in time
    assert earlier[0] == earlier[2] == 0 and accepted[1] - 30 < earlier[1] <= accepted[1]


FEW = {
    "one step ahead, few pages": (),
    "no step ahead": pytest.mark.thorough,
    "states of delta nets, three steps ahead": pytest.mark.thorough,
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=FEW.get(case, pytest.mark.exhaustive)) for case in CASES])
def test_whatever_others_said_and_whatever_happens_the_tokens_are_the_same(tmp_path, case):
    """As of requests that share nothing, while the cache is reset or lost, the same weights come again, requests end in the
    midst, are preempted and asked again, and the engine sleeps. And what is forgotten is forgotten."""
    variant, settings = CASES[case]
    layers = {"num_hidden_layers": 1} if variant == "llama2" else {}
    model = build_checkpoint(tmp_path, variant, max_position_embeddings=MAX_MODEL_LEN, **layers)
    engine, happened = build_engine(model, SPECULATION, **settings), Counter()
    happens = ("reset", "ended", "lost", "updated", "kept", "ended")

    def disturb(engine):
        number = happened["step"] = happened["step"] + 1
        what = happens[number // 40 % len(happens)] if number % 40 == 0 else "nothing" if engine.has_work else "sleep"
        outputs = []
        if what == "reset":
            engine.reset_prefix_cache()
        elif what == "lost":
            outputs = engine.settle()
            engine.forget_cache()
        elif what in ("updated", "kept"):
            staged, outputs = engine.stage_weights(WeightFiles(str(model))), engine.settle()
            engine.update_weights(staged, keep_cache=what == "kept")
        elif what == "ended" and engine.sequence_ids:
            name = engine.sequence_ids[-1]
            engine.finish(name)
            outputs = [SequenceOutput(name, [], "abort")]
        elif what == "sleep" and number % 3 == 0:
            engine.sleep()
            engine.wake()
        else:
            return []
        happened[what] += 1
        assert what in ("ended", "kept") or engine.stats().earlier_tokens == 0
        return outputs

    expected = answers(engine, build_sequences(3, 40, engine.limits.vocab_size, salts=[None]))
    assert engine.stats().earlier_tokens == 0
    for at_once, salts in ((5, [b"", b"", b"another", None]), (1, [b""])):
        sequences = build_sequences(3, 40, engine.limits.vocab_size, salts=salts)
        for name, got in answers(engine, sequences, at_once=at_once, between=disturb).items():
            if got[2] == ["abort"]:
                assert all(theirs[: len(ours)] == ours for ours, theirs in zip(got[:2], expected[name], strict=False))
            else:
                assert got == expected[name]

    stats = engine.stats()
    assert stats.num_earlier_accepted_tokens > 0 and stats.compilations_after_ready == 0
    assert set(happened) == {"step", "sleep", *happens}


def test_rows_with_constraints_are_given_the_same_with_the_tokens_that_these_force(engines):
    """Forced right and wrong, with masks for some of them, in time and late, beside rows with drafts of their own."""
    plain, ours = engines
    arguments = 2, 15, plain.limits.vocab_size, (0, 1, 3, 4)
    expected, sequences = answers(plain, build_sequences(*arguments)), build_sequences(*arguments)
    ours.start_counting()

    assert answers(ours, sequences) == expected

    constrained = [sequence for sequence in sequences if sequence.constraint is not None]
    opted_out = [sequence.params.num_speculative_tokens == 0 for sequence in constrained]
    several = [sequence.constraint.most_at_once > 1 for sequence in constrained]
    assert any(opted_out) and not any(both == (True, True) for both in zip(opted_out, several, strict=True))
    assert sum(several) > opted_out.count(False) / 2
    assert ours.stats().compilations_after_ready == 0


def test_who_is_not_in_a_failing_step_is_given_the_same(engines, monkeypatch):
    """All state on the device is lost, the history of tokens with it."""
    assert_the_same_beside_failing_steps(*engines, monkeypatch)


def assert_the_same_beside_failing_steps(plain, ours, monkeypatch):
    """Steps of our engine fail now and then; who is in none is given what the plain engine gives."""
    expected = answers(plain, build_sequences(1, 12, plain.limits.vocab_size))
    fail_now_and_then(ours, monkeypatch)

    got = answers(ours, build_sequences(1, 12, plain.limits.vocab_size))

    failed = {name for name, (_, _, ends) in got.items() if ends == ["error"]}
    assert len(failed) < len(got) and all(got[name] == expected[name] for name in got.keys() - failed)


def fail_now_and_then(engine, monkeypatch, *, every=25, most_rows=3):
    """Of steps with few rows those fail that come at a multiple of ``every``."""
    collect, count = engine._runner.collect, 0

    def failing(step):
        nonlocal count
        count += 1
        if count % every == 0 and step.plan.num_rows <= most_rows:
            raise DeviceError("lost")
        return collect(step)

    monkeypatch.setattr(engine._runner, "collect", failing)


@pytest.mark.thorough
def test_a_next_turn_begins_from_a_state_among_drafts(tmp_path, monkeypatch):
    """It computes what of the tokens behind that state is before its own, and is given what it is without drafts."""
    directory = build_checkpoint(tmp_path, "qwen3_next", max_position_embeddings=MAX_MODEL_LEN)
    plain, ours = (build_engine(directory, config, num_pages=120, page_size=4) for config in (None, SPECULATION))
    dispatch, behind = ours._runner.dispatch, []

    def watched(plan):
        bases = np.asarray(ours._runner._executor._cache.states[0][2])[:, 0]
        for start, source in list(zip(plan.starts, plan.state_sources, strict=True))[plan.num_decodes :]:
            behind.append(start - bases[source] if source != SINK_SLOT else 0)
        return dispatch(plan)

    monkeypatch.setattr(ours._runner, "dispatch", watched)
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 5, 8])
    for number in range(6):
        prompt = [number, 3, 5, 8] * 3
        for turn in range(3):
            name, most = f"{number} {turn}", 11 + turn
            expected, got = (
                answers(engine, [Sequence(name, prompt, params, frozenset(), most, 0)])[name]
                for engine in (plain, ours)
            )
            assert got == expected
            prompt = [*prompt, *got[0], 9 + turn]

    assert sum(count > 0 for count in behind) > 3
    assert ours.stats().compilations_after_ready == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_a_hundred_thousand_tokens_are_the_same(tmp_path, run_ahead):
    """In random histories of all parameters, with too few pages for all."""
    directory = build_checkpoint(tmp_path, "llama2", max_position_embeddings=MAX_MODEL_LEN)
    plain, ours = (build_engine(directory, config, num_pages=14, run_ahead=run_ahead) for config in (None, SPECULATION))
    for seed in range(40):
        expected = answers(plain, build_sequences(seed, 40, plain.limits.vocab_size))
        got = answers(ours, build_sequences(seed, 40, plain.limits.vocab_size))
        assert got == expected
    assert ours.stats().generated_tokens > 25_000
