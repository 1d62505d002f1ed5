"""A draft model in the real engine: it changes nothing of what a request is given, and its pages are right wherever those of
the model are. A model that drafts for itself shows that: every draft is accepted, unless a page of the draft's is wrong."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from forced_tokens import ForcedTokens, MostTokens
from msgspec import json, structs
from test_speculative_engine import (
    MAX_MODEL_LEN,
    answers,
    assert_the_same_beside_failing_steps,
    build_engine,
    build_sequences,
    fail_now_and_then,
)
from tokenizer_files import build_byte_level, write_tokenizer

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.hub.obtain import obtained
from engine.sampling_params import SamplingParams
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.sequence import Sequence
from engine.served_model import served_model
from ipc.service.facts_alike import facts_alike
from ipc.service.start_up import load_tokenizer

DRAFTS = 3
CASES = {
    "one step ahead, few pages": ("llama2", "llama2", {"num_pages": 14}),
    "no step ahead, another's heads": ("qwen3", "llama2", {"num_pages": 40, "run_ahead": 0}),
    "three steps ahead, a draft model with windows": ("llama2", "gemma3", {"num_pages": 30, "run_ahead": 3}),
    "windows": ("gemma3", "qwen3", {"num_pages": 120, "run_ahead": 2}),
    "latents": ("deepseek_v3_plain", "llama2", {"num_pages": 20}),
    "a draft model with latents": ("llama2", "deepseek_v3_plain", {"num_pages": 20}),
    "a draft model with experts": ("llama2", "qwen3_moe", {"num_pages": 20}),
    "two devices": ("llama2", "qwen3", {"num_pages": 14, "tensor_parallel_size": 2}),
    "8-bit pages": ("llama2", "qwen3", {"num_pages": 14, "kv_cache_dtype": "int8", "quantization": "int8"}),
    "XLA's attention": ("llama2", "qwen3", {"num_pages": 14, "attention_backend": "xla"}),
    "a table of positions": ("llama2", "opt", {"num_pages": 14}),
}
ALONE = {
    "one step ahead, few pages": ("llama2", {"num_pages": 14}),
    "no step ahead": ("qwen3", {"num_pages": 14, "run_ahead": 0}),
    "three steps ahead": ("llama2", {"num_pages": 14, "run_ahead": 3}),
    "windows": ("gemma3", {"num_pages": 86, "run_ahead": 2}),
    "two devices": ("llama2", {"num_pages": 14, "tensor_parallel_size": 2}),
    "pages on the host": ("llama2", {"num_pages": 14, "host_cache_gib": 0.01}),
    "a table of positions": ("opt", {"num_pages": 14}),
}
DEFAULT = "one step ahead, few pages"


SOME = ("windows", "8-bit pages", "three steps ahead", "pages on the host")


def cases(named, *of_default):
    """The names, of which most take too long for every run. One has the marks ``of_default``."""
    marks = {DEFAULT: of_default, **dict.fromkeys(SOME, pytest.mark.thorough)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.exhaustive)) for name in named]


def config_of(draft, **keys):
    """The setting, as JSON."""
    keys = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": DRAFTS, **keys}
    return json.encode(keys).decode()


def build_model(directory, variant, **keys):
    """A checkpoint of the tests' context."""
    return build_checkpoint(directory / variant, variant, max_position_embeddings=MAX_MODEL_LEN, **keys)


def plain_requests(seed, count, vocabulary, *, longest=40):
    """Requests without parameters that a draft model does not know, of which many begin alike."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(vocabulary) for _ in range(longest)] for _ in range(3)]
    sequences = []
    for number in range(count):
        prompt = [*rng.choice(beginnings)[: rng.randint(2, longest)], rng.randrange(vocabulary)]
        params = SamplingParams(
            temperature=rng.choice([0, 0, 1.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([1, 0.7])
        )
        most = rng.randint(5, MAX_MODEL_LEN - len(prompt))
        sequences.append(Sequence(str(number), prompt, params, frozenset([2]), most, rng.randrange(99)))
    return sequences


def acceptance(engine, before):
    """Of the drafts that were verified since its stats were those, the share that was right."""
    after = engine.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted > 30, "a test without drafts shows nothing"
    return (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


@pytest.fixture(scope="module", params=cases(CASES, pytest.mark.thorough))
def engines(request, tmp_path_factory):
    """Of one model, without drafts and with those of another."""
    variant, other, settings = CASES[request.param]
    directory = tmp_path_factory.mktemp("draft")
    model, draft = build_model(directory, variant), build_model(directory / "draft", other, seed=1)
    return [build_engine(model, config, **settings) for config in (None, config_of(draft))]


def test_every_request_is_given_the_same_with_a_draft_model(engines):
    """Greedy and drawn, with penalties, bias, bad words, masks, stops and log-probabilities, preempted and from prefixes."""
    plain, ours = engines
    expected = answers(plain, build_sequences(0, 12, plain.limits.vocab_size))
    ours.start_counting()

    got = answers(ours, build_sequences(0, 12, plain.limits.vocab_size))

    assert got == expected
    stats = ours.stats()
    assert stats.num_draft_tokens > 100 and stats.compilations_after_ready == 0


def test_who_is_not_in_a_failing_step_is_given_the_same(engines, monkeypatch):
    """The draft model's pages are lost with the model's, and computed again with them."""
    assert_the_same_beside_failing_steps(*engines, monkeypatch)


@pytest.fixture(scope="module", params=cases(ALONE))
def own(request, tmp_path_factory):
    """An engine whose model drafts for itself."""
    variant, settings = ALONE[request.param]
    model = build_model(tmp_path_factory.mktemp("own"), variant)
    engine = build_engine(model, config_of(model), **settings)
    engine.expects_loads = "host_cache_gib" in settings
    return engine


def test_a_model_that_drafts_for_itself_is_always_right(own):
    """Greedy and drawn, whether a page was computed in chunks, found, computed again after preemption, or copied to the host
    and back: where the draft model lacked a token, its drafts would be others."""
    before = own.stats()

    answers(own, plain_requests(0, 20, own.limits.vocab_size), at_once=9)

    stats = own.stats()
    assert acceptance(own, before) == 1.0
    assert stats.preemptions and stats.prefix_cache_hits
    assert not own.expects_loads or stats.host_bytes_loaded


def test_a_model_that_drafts_for_itself_is_right_behind_tokens_that_were_forced(own):
    """The draft model has not drafted them, and is fed them."""
    vocabulary = own.limits.vocab_size
    forced = [
        Sequence(
            f"forced {number}", [number, 5], SamplingParams(temperature=0), frozenset(), 60, 0,
            constraint=ForcedTokens(number % 2, vocabulary, DRAFTS),
        )
        for number in range(3)
    ]  # fmt: skip
    answers(own, forced)
    assert all(sequence.constraint.most_at_once > 1 for sequence in forced)
    before = own.stats()

    texts = [sequence.prompt_token_ids + sequence.output_token_ids for sequence in forced]
    params = SamplingParams(temperature=0)
    answers(own, [Sequence(str(number), text, params, frozenset(), 30, 0) for number, text in enumerate(texts)])

    assert own.stats().prefix_cache_hits - before.prefix_cache_hits > 30
    assert acceptance(own, before) == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["llama2", "opt"])
def test_a_draft_model_of_a_shorter_context_drafts_to_its_end(tmp_path, variant):
    """Each of a model for itself is right, and behind that context the sequence goes on without any."""
    context, prompt = 40, list(range(3, 13))
    draft = build_model(tmp_path / "draft", variant)
    config = json.decode((draft / "config.json").read_bytes())
    if variant == "opt":
        tensors, table = random_tensors(config, VARIANTS[variant].seed), "model.decoder.embed_positions.weight"
        write_tensors(draft, tensors | {table: tensors[table][: context + 2]})
    (draft / "config.json").write_bytes(json.encode(config | {"max_position_embeddings": context}))
    engine = build_engine(build_model(tmp_path, variant), config_of(draft), num_pages=30)
    before = engine.stats()

    most = MAX_MODEL_LEN - len(prompt)
    answers(engine, [Sequence("a", prompt, SamplingParams(temperature=0), frozenset(), most, 0)])

    drafted = engine.stats().num_draft_tokens - before.num_draft_tokens
    assert (context - len(prompt)) / 2 < drafted <= context - len(prompt) < most / 2
    assert engine.stats().num_accepted_tokens - before.num_accepted_tokens == drafted


def costs_little_more_with_more_tokens(engine, monkeypatch):
    """Whatever else the machine does: a step's drafts and prompts are as many as it has room for."""
    update = engine._scheduler.update

    def updated(plan, result, seconds):
        return update(plan, result, None if seconds is None else 1e-3 + 1e-6 * plan.num_tokens)

    monkeypatch.setattr(engine._scheduler, "update", updated)


@pytest.mark.thorough
def test_a_row_with_a_grammar_has_the_drafts_that_this_allows(own, monkeypatch):
    """It is given what it is without drafts, greedy and drawn, preempted and beside others; what its grammar allows of a model's
    drafts for itself is right."""
    vocabulary = own.limits.vocab_size

    def requests(drafts):
        sequences = plain_requests(5, 16, vocabulary)
        for number, sequence in enumerate(sequences):
            sequence.params = structs.replace(sequence.params, num_speculative_tokens=drafts)
            if number % 4:
                sequence.constraint = MostTokens(number % 3, vocabulary, DRAFTS)
        return sequences

    land, accepted = own._scheduler.speculation.land, []

    def watched(sequence, num_samples, num_tokens, num_found, num_forced=None):
        if sequence.constraint is not None and num_forced is None:
            accepted.append(num_tokens - 1)
        land(sequence, num_samples, num_tokens, num_found, num_forced)

    costs_little_more_with_more_tokens(own, monkeypatch)
    monkeypatch.setattr(GrowthReserve, "pages", lambda *growth: 0)  # whatever was learned of others, pages run out
    expected, before = answers(own, requests(0), at_once=9), own.stats()
    monkeypatch.setattr(own._scheduler.speculation, "land", watched)

    sequences = requests(None)
    assert answers(own, sequences, at_once=9) == expected

    num_allowed = sum(sequence.constraint.num_guesses for sequence in sequences if sequence.constraint is not None)
    assert own.stats().preemptions > before.preemptions
    assert 0.8 * num_allowed < sum(accepted) <= num_allowed and num_allowed > 20


@pytest.mark.thorough
def test_a_model_that_drafts_for_itself_is_right_after_failing_steps(own, monkeypatch):
    """All pages are new, and the sequences' are computed again."""
    fail_now_and_then(own, monkeypatch, every=8, most_rows=5)
    before = own.stats()

    answers(own, plain_requests(3, 16, own.limits.vocab_size))

    assert own.stats().failed_steps > before.failed_steps and acceptance(own, before) == 1.0


@pytest.mark.thorough
def test_every_request_is_given_the_same_as_without_drafts(own):
    """Of all parameters, in the same engine; those that ask for no drafts are fed to the draft model all the same."""
    without, vocabulary = build_sequences(0, 12, own.limits.vocab_size), own.limits.vocab_size
    for sequence in without:
        sequence.params = structs.replace(sequence.params, num_speculative_tokens=0)
    expected, before = answers(own, without), own.stats().num_accepted_tokens
    jax.clear_caches()  # of functions that no other engine has compiled, none is left

    assert answers(own, build_sequences(0, 12, vocabulary)) == expected
    assert own.stats().num_accepted_tokens - before > 20 and own.stats().compilations_after_ready == 0


def test_with_wrong_pages_a_model_is_wrong_about_itself(own):
    """So the tests above would see it."""
    before = own.stats()
    for sequence in plain_requests(1, 4, own.limits.vocab_size):
        own.add(sequence)
    while own.has_work:
        executor = own._runner._executor
        spoilt = tuple(jax.tree.map(jnp.zeros_like, executor._cache.draft))
        executor._cache = replace(executor._cache, draft=spoilt)
        own.step()
    own.reset_prefix_cache()

    assert acceptance(own, before) < 0.9


@pytest.mark.thorough
def test_a_request_may_have_fewer_drafts_or_none(own):
    """Beside others that have as many as there are."""
    requests = plain_requests(2, 12, own.limits.vocab_size)
    for number, request in enumerate(requests):
        request.params = SamplingParams(num_speculative_tokens=(None, 0, 1)[number % 3])
    before = own.stats()

    answers(own, requests)

    assert acceptance(own, before) == 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_programs_of_few_rows_draft_for_them(tmp_path, rows):
    """Steps of all sizes; the drafts are those of the model for itself."""
    model = build_model(tmp_path, "llama2")
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 60, "max_model_len": 96}
    from engine.build import build_engine as engine_of

    engine = engine_of(EngineConfig(model=str(model), speculative_config=config_of(model), **sizes), lambda _: None)
    engine._scheduler.speculation._seconds = lambda _tokens, _passes: None
    before = engine.stats()

    answers(engine, plain_requests(4, 8, engine.limits.vocab_size), at_once=rows)

    assert acceptance(engine, before) == 1.0 and engine.stats().compilations_after_ready == 0


def test_a_draft_model_that_does_not_fit_is_refused_by_name(tmp_path):
    """Another vocabulary, recurrent layers, and a model whose layers all have windows."""
    model, recurrent = build_model(tmp_path, "llama2"), build_model(tmp_path, "qwen3_next")
    larger = build_model(tmp_path / "larger", "llama2", vocab_size=160)
    windows = build_model(tmp_path / "windows", "mistral", sliding_window=8)
    for served, draft, why in (
        (model, larger, "a vocabulary of 160 tokens, and the model one of 144"),
        (model, recurrent, "recurrent layers"),
        (windows, model, "all layers of this model have windows"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            served_model(EngineConfig(model=str(served), speculative_config=config_of(draft)))


def test_a_draft_model_is_split_as_the_model_is(tmp_path):
    """What does not divide is said of the draft model."""
    model, draft = (
        build_model(tmp_path, "llama2"),
        build_model(tmp_path / "draft", "llama2", num_attention_heads=3, hidden_size=36, num_key_value_heads=3),
    )

    with pytest.raises(ConfigurationError, match=r"the draft model .*: tensor_parallel_size 2 does not divide the 3"):
        served_model(EngineConfig(model=str(model), tensor_parallel_size=2, speculative_config=config_of(draft)))


def test_a_draft_model_of_other_tokens_is_refused(tmp_path):
    """Of which the first is named."""
    model, draft = build_model(tmp_path, "llama2"), build_model(tmp_path / "draft", "llama2")
    write_tokenizer(model, build_byte_level())
    write_tokenizer(draft, build_byte_level())
    config = EngineConfig(model=str(model), speculative_config=config_of(draft))
    assert load_tokenizer(config).encode_word("the")
    swap_two_tokens(draft / "tokenizer.json")

    with pytest.raises(ConfigurationError, match="to the draft model"):
        load_tokenizer(config)


def swap_two_tokens(path):
    """Two words of a vocabulary have each other's ids."""
    definition = json.decode(path.read_bytes())
    vocabulary = definition["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_bytes(json.encode(definition))


def test_a_draft_model_is_named_as_a_model_is(tmp_path):
    """A directory takes the place of its name, and hosts may have it in different places."""
    model, draft = build_model(tmp_path, "llama2"), build_model(tmp_path / "draft", "llama2")
    write_tokenizer(model, build_byte_level())
    facts = []
    for place in (draft, build_model(tmp_path / "elsewhere", "llama2")):
        config = obtained(EngineConfig(model=str(model), speculative_config=config_of(place)), lambda _: None)
        assert config.of_draft_model.directory == place
        facts.append(facts_alike(config))

    assert facts[0] == facts[1]
    different = build_model(tmp_path / "different", "llama2", num_hidden_layers=1)
    config = replace(config, speculative_config=config_of(different))
    assert facts_alike(config) != facts[0]
    with pytest.raises(ConfigurationError, match="nowhere is not a directory"):
        obtained(EngineConfig(model=str(model), speculative_config=config_of("nowhere")), lambda _: None)
