"""A draft head in the real engine: it changes nothing of what a request is given, and its drafts are those of a plain twin,
which computes them anew of each text, however the engine came to that text."""

import json
import random
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistant_checkpoints import ASSISTANTS
from assistant_checkpoints import VARIANT as ASSISTED
from checkpoints import VARIANTS, random_tensors
from flax import nnx
from forced_tokens import MostTokens
from head_checkpoints import CONTEXT, HEADS, build_head, build_target, head_tensors
from loading import FLOAT32, load
from msgspec import structs
from mtp_checkpoints import PREDICTORS, predicting_tensors
from plain_assistant import chained as assisted
from plain_attention import DenseAttention
from plain_head import PlainHead, layer_inputs
from test_draft_head import GOLDENS, built, config_of
from test_speculative_engine import (
    answers,
    assert_the_same_beside_failing_steps,
    build_engine,
    build_sequences,
    fail_now_and_then,
)

from engine.build import build_engine as engine_of
from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.live.weight_source import WeightArrays
from engine.models.heads.assistant_config import read_assistant
from engine.models.heads.mtp_layer import mtp_head
from engine.models.partition import split
from engine.models.rope import rotations
from engine.models.step_context import StepContext
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import load_decoder
from engine.sampling_params import SamplingParams
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.sequence import Sequence
from engine.speculation.history import NO_DRAFT
from engine.step.drafts.draft_programs import DRAFT

CLEAR = 1e-3
"""Between the logits of two drafts: nearer ones rounding may turn."""
CASES = {
    "one step ahead, few pages": ("authors", {"num_pages": 14}),
    "no step ahead": ("whole vocabulary", {"num_pages": 14, "run_ahead": 0}),
    "three steps ahead": ("authors", {"num_pages": 14, "run_ahead": 3}),
    "two devices": ("authors", {"num_pages": 14, "tensor_parallel_size": 2}),
    "pages on the host": ("whole vocabulary", {"num_pages": 14, "host_cache_gib": 0.01}),
    "pages of fewer tokens than drafts": ("whole vocabulary", {"num_pages": 50, "page_size": 2}),
    "XLA's attention": ("authors", {"num_pages": 14, "attention_backend": "xla"}),
    "a layer of GLM": ("mtp of GLM", {"num_pages": 14}),
    "a layer of GLM, two devices": ("mtp of GLM", {"num_pages": 14, "tensor_parallel_size": 2}),
    "a layer of GLM, small pages": ("mtp of GLM", {"num_pages": 50, "page_size": 2, "run_ahead": 3}),
    "a layer of DeepSeek": ("mtp of DeepSeek", {"num_pages": 14, "run_ahead": 0}),
    "a layer of DeepSeek, two devices": ("mtp of DeepSeek", {"num_pages": 14, "tensor_parallel_size": 2}),
    "a layer of DeepSeek, pages on the host": ("mtp of DeepSeek", {"num_pages": 14, "host_cache_gib": 0.01}),
    "a layer of Qwen3-Next": ("mtp of Qwen3-Next", {"num_pages": 14, "run_ahead": 3}),
    "a layer of Qwen3-Next, two devices": ("mtp of Qwen3-Next", {"num_pages": 14, "tensor_parallel_size": 2}),
    "a layer of Qwen3.5, on the host": ("mtp of Qwen3.5", {"num_pages": 14, "host_cache_gib": 0.01, "page_size": 8}),
    "an assistant": ("assistant", {"num_pages": 26}),
    "an assistant, no step ahead": ("assistant in clusters", {"num_pages": 26, "run_ahead": 0}),
    "an assistant, on the host": ("assistant", {"num_pages": 48, "page_size": 8, "host_cache_gib": 0.01}),
    "an assistant, small pages": ("assistant in clusters", {"num_pages": 90, "page_size": 2, "run_ahead": 3}),
    "an assistant, two devices": (
        "assistant in clusters",
        {"num_pages": 30, "page_size": 8, "tensor_parallel_size": 2},
    ),
    "an assistant, XLA's attention": (
        "assistant in clusters",
        {"num_pages": 30, "page_size": 8, "attention_backend": "xla"},
    ),
}
OTHERS = {
    "another size": ("another size", {"num_pages": 14}),
    "a qwen": ("speculators", {"num_pages": 14}),
    "8-bit pages": ("authors", {"num_pages": 14, "kv_cache_dtype": "int8", "quantization": "int8"}),
    "a layer of GLM, 8-bit pages": ("mtp of GLM", {"num_pages": 14, "kv_cache_dtype": "int8", "quantization": "int8"}),
    "a layer of GLM Flash": ("mtp of GLM Flash", {"num_pages": 14}),
}
WHOLE = {name: case for name, case in CASES.items() if case[0] in ("whole vocabulary", "assistant", *PREDICTORS)}
SOME = (
    "two devices",
    "a layer of DeepSeek, pages on the host",
    "an assistant, small pages",
)


def of(named):
    """For tests of these, of which the thorough tests have some, and the exhaustive ones all."""
    marks = {name: pytest.mark.thorough if name in SOME else pytest.mark.exhaustive for name in named}
    params = [pytest.param(case, id=name, marks=marks[name]) for name, case in named.items()]
    return pytest.mark.parametrize("one", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def one(request, tmp_path_factory):
    """An engine with a draft head, and its twin."""
    (name, settings), directory = request.param, tmp_path_factory.mktemp("head")
    model, head, config = built(directory, name)
    return SimpleNamespace(
        engine=build_engine(model, config, **settings), twin=twin_of(name, model, head), settings=settings
    )


def twin_of(name, model, head):
    """That of a head."""
    if name in ASSISTANTS:
        return AssistantTwin(name, model, head)
    return PredictorTwin(name, model) if name in PREDICTORS else EagleTwin(name)


@pytest.fixture
def drafted(one, monkeypatch):
    """What is drafted: pairs of a text and its drafts."""
    return watched(one.engine, monkeypatch)


def watched(engine, monkeypatch):
    """A list that grows as the engine drafts."""
    seen, manager = [], engine._runner._manager
    original = manager.executable

    def watching(name, size):
        program = original(name, size)

        def run(weights, cache, slots, fed, rows_drafted, key):
            slot, count = rows_drafted
            lasts = np.asarray(slots.num_tokens)[slot] - np.asarray(fed.num_wrong)[slot]
            cache, fed, told = program(weights, cache, slots, fed, rows_drafted, key)
            ids, copied = np.asarray(fed.ids), np.asarray(told)
            for place, (row, last, most) in enumerate(zip(slot, lasts, count, strict=True)):
                if most:
                    text, drafts = ids[row, : last + 1], ids[row, last + 1 : last + 1 + most]
                    assert drafts.tolist() == copied[place, :most].tolist() and np.all(copied[place, most:] == NO_DRAFT)
                    seen.append((tuple(text.tolist()), drafts.tolist()))
            return cache, fed, told

        return run if name == DRAFT else program

    monkeypatch.setattr(manager, "executable", watching)
    return seen


class Twin:
    """What a head drafts behind any text."""

    def change(self, seed):
        """The model has other weights, ``tensors``."""
        raise NotImplementedError

    def drafts(self, text):
        """Behind its first 2 tokens and so on, three drafts, each with how far it is before the next likely one."""
        raise NotImplementedError

    def assert_drafts(self, drafted, least):
        """These texts have these drafts: so many of them are compared."""
        longest, compared = [], 0
        for text in sorted({text for text, _ in drafted}):
            longest = longest[:-1] if longest and text[: len(longest[-1])] == longest[-1] else longest
            longest.append(text)
        expected = {}
        for text in longest:
            expected |= {text[: 2 + number]: drafts for number, drafts in enumerate(self.drafts(list(text)))}
        for text, drafts in drafted:
            for ours, (theirs, gap) in zip(drafts, expected[text], strict=False):
                if gap < CLEAR:
                    break
                assert ours == theirs, f"behind {len(text)} tokens"
                compared += 1
        assert compared >= least, "a test without drafts shows nothing"


class EagleTwin(Twin):
    """Of a head of EAGLE-3, by numpy."""

    def __init__(self, name):
        head = HEADS[name]
        self._config = {**VARIANTS[head.target].config, **head.overrides, "max_position_embeddings": CONTEXT}
        self._name, self.seed = name, VARIANTS[head.target].seed
        self.change(self.seed)

    def change(self, seed):
        """See Twin."""
        self.tensors = random_tensors(self._config, seed)
        embedding, head = self.tensors["model.embed_tokens.weight"], HEADS[self._name]
        self._head, self._taps = PlainHead(head.layer, head_tensors(self._name), embedding), head.taps

    def drafts(self, text):
        """See Twin."""
        inputs = layer_inputs(self._config, self.tensors, text)
        return self._head.drafts([inputs[layer] for layer in self._taps], text, 3)


WIDTH = CONTEXT + 2
"""The longest text and two drafts."""
CLEAR_ROUTE = 3e-5
"""Between the scores of the last expert that a router takes and the first that it leaves."""


class PredictorTwin(Twin):
    """Of a layer of the model's checkpoint, by its module over whole texts, which is held against torch elsewhere."""

    def __init__(self, name, directory):
        self._predictor, self._decoder = PREDICTORS[name], load(directory)
        self._mesh = DeviceMesh((jax.local_devices()[0],))
        head = split(mtp_head(self._decoder.partition.model), 1)
        self._head = self._loaded(predicting_tensors(name), head)
        self.seed = VARIANTS[self._predictor.variant].seed
        self.change(self.seed)

    def _loaded(self, tensors, partition):
        return load_decoder(Arrays(tensors), partition, FLOAT32, mesh=self._mesh, progress=lambda *_: None)

    def change(self, seed):
        """See Twin."""
        self.tensors = random_tensors(self._predictor.config, seed)
        self._decoder = self._loaded(self.tensors, self._decoder.partition)

    def drafts(self, text):
        """See Twin."""
        padded = jnp.array(text + [0] * (WIDTH - len(text)), jnp.int32)
        chains = zip(*(np.asarray(each).tolist() for each in chained(self._decoder, self._head, padded)), strict=True)
        return [list(zip(*chain, strict=True)) for chain in chains][1 : len(text)]


class AssistantTwin(Twin):
    """Of an assistant, by its module over whole texts, which is held against torch elsewhere."""

    def __init__(self, name, model, directory):
        self._config, self.seed = ASSISTANTS[name].of_model, VARIANTS[ASSISTED].seed
        self._decoder, self._mesh = load(model), DeviceMesh((jax.local_devices()[0],))
        partition = split(read_assistant(directory, self._decoder.partition.model, name), 1)
        self._assistant = self._loaded(open_checkpoint(directory), partition)
        self.change(self.seed)

    def _loaded(self, source, partition):
        return load_decoder(source, partition, FLOAT32, mesh=self._mesh, progress=lambda *_: None)

    def change(self, seed):
        """See Twin."""
        self.tensors = random_tensors(self._config, seed)
        self._decoder = self._loaded(Arrays(self.tensors), self._decoder.partition)

    def drafts(self, text):
        """See Twin."""
        padded = jnp.array(text + [0] * (WIDTH - len(text)), jnp.int32)
        values, tokens = (
            np.asarray(each) for each in jax.lax.top_k(assisted(self._decoder, self._assistant, padded), 2)
        )
        gaps = values[..., 0] - values[..., 1]
        return [list(zip(tokens[:, at, 0].tolist(), gaps[:, at].tolist(), strict=True)) for at in range(1, len(text))]


@nnx.jit
def chained(decoder, head, text):
    """Of i32[WIDTH], behind the first token and so on: i32[WIDTH, 3] drafts, and f32[WIDTH, 3] how clear each is; not at all
    if some router is at a near-tie before."""
    rows, positions = jnp.arange(WIDTH), jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), (WIDTH, WIDTH))
    steps = [
        StepContext(rotations(each.partition.model, at), DenseAttention())
        for each, at in ((decoder, positions[:1]), (head, positions))
    ]
    with routes() as of_model:
        _, normed = decoder(text[None], [None] * decoder.partition.model.num_layers, steps[0])
    tokens, shared = jnp.broadcast_to(text, (WIDTH, WIDTH)), head.shared(decoder)
    features = jnp.broadcast_to(jnp.roll(normed, 1, axis=1), (WIDTH, *normed.shape[1:]))
    drafts, gaps = [], []
    for place in range(3):
        with routes() as of_head:
            _, hidden = head(tokens, positions, features, [None], steps[1], shared)
        at = rows, jnp.minimum(rows + place, WIDTH - 1)
        route = jnp.minimum(nearest(of_model, (1, WIDTH))[0], nearest(of_head, (WIDTH, WIDTH))[at])
        likeliest, found = jax.lax.top_k(head.logits(hidden[at], shared), 2)
        drafts.append(found[:, 0])
        gaps.append(jnp.where(route < CLEAR_ROUTE, np.float32(0), likeliest[:, 0] - likeliest[:, 1]))
        tokens = tokens.at[rows, rows + place + 1].set(found[:, 0], mode="drop")
        features = features.at[rows, rows + place + 1].set(hidden[at], mode="drop")
    return jnp.stack(drafts, axis=1), jnp.stack(gaps, axis=1)


@contextmanager
def routes():
    """Of what is traced meanwhile, by router: f32[tokens] how clear its choices are."""
    seen, top_k = [], jax.lax.top_k

    def watched(scores, k):
        if k < scores.shape[-1]:
            ranked = top_k(scores, k + 1)[0]
            seen.append((ranked[..., k - 1] - ranked[..., k]).reshape(len(scores), -1).min(axis=1))
        return top_k(scores, k)

    with patch.object(jax.lax, "top_k", watched):
        yield seen


def nearest(seen, shape):
    """f32[rows, tokens] the least clear of all routers, if there are any, of these tokens and those before them."""
    if not seen:
        return jnp.full(shape, jnp.inf)
    return jax.lax.cummin(jnp.stack(seen).min(axis=0).reshape(shape), axis=1)


def requests(seed, count, vocabulary, **params):
    """Greedy requests, of which many begin alike."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(vocabulary) for _ in range(40)] for _ in range(3)]
    sequences = []
    for number in range(count):
        prompt = [*rng.choice(beginnings)[: rng.randint(2, 40)], rng.randrange(vocabulary)]
        most = rng.randint(5, CONTEXT - len(prompt))
        sampling = SamplingParams(**{"temperature": 0, **params})
        sequences.append(Sequence(f"{seed} {number}", prompt, sampling, frozenset(), most, rng.randrange(99)))
    return sequences


@of(CASES | OTHERS)
def test_every_request_is_given_the_same_as_without_drafts(one):
    """Greedy and drawn, with penalties, bias, bad words, masks, stops and log-probabilities, preempted and from prefixes."""
    vocabulary, before = one.engine.limits.vocab_size, one.engine.stats()
    without = build_sequences(0, 12, vocabulary)
    for sequence in without:
        sequence.params = structs.replace(sequence.params, num_speculative_tokens=0)
    expected = answers(one.engine, without)
    assert one.engine.stats().num_draft_tokens == before.num_draft_tokens
    jax.clear_caches()  # of functions that no other engine has compiled, none is left

    assert answers(one.engine, build_sequences(0, 12, vocabulary)) == expected
    stats = one.engine.stats()
    assert stats.num_draft_tokens - before.num_draft_tokens > 100
    assert stats.compilations_after_ready == before.compilations_after_ready


@of(CASES)
def test_drafts_are_those_of_the_twin(one, drafted, monkeypatch):
    """Whether a page was computed in chunks, found, computed again after preemption, or copied to the host and back."""
    monkeypatch.setattr(GrowthReserve, "pages", lambda *growth: 0)  # whatever was learned of others, pages run out
    before = one.engine.stats()

    answers(one.engine, requests(0, 20, one.engine.limits.vocab_size), at_once=9)

    stats = one.engine.stats()
    assert stats.prefix_cache_hits > before.prefix_cache_hits
    assert stats.preemptions > before.preemptions or "page_size" in one.settings
    assert "host_cache_gib" not in one.settings or stats.host_bytes_loaded
    one.twin.assert_drafts(drafted, 400)


@of(CASES)
def test_rows_with_a_grammar_have_drafts_of_the_text_that_it_allows(one, drafted):
    """And are given what they are given without drafts."""
    vocabulary = one.engine.limits.vocab_size

    def constrained(drafts):
        sequences = requests(7, 12, vocabulary, num_speculative_tokens=drafts)
        for number, sequence in enumerate(sequences):
            sequence.constraint = MostTokens(number % 3, vocabulary, 3)
        return sequences

    expected = answers(one.engine, constrained(0), at_once=9)
    assert not drafted

    assert answers(one.engine, constrained(None), at_once=9) == expected

    waits = one.settings.get("run_ahead") == 0  # for masks, and not for another that drafts would need
    one.twin.assert_drafts(drafted, 0 if waits else 40)


@of(WHOLE)
def test_drafts_behind_accepted_ones_are_those_of_the_twin(one, drafted):
    """Requests so hot that each token is as likely as any draw the same as the head, and most drafts are right. Others go
    on from their pages."""
    vocabulary, before = one.engine.limits.vocab_size, one.engine.stats()
    hot = requests(1, 9, vocabulary, temperature=100.0)
    answers(one.engine, hot)
    accepted = one.engine.stats().num_accepted_tokens - before.num_accepted_tokens
    assert accepted > 50
    texts = [sequence.prompt_token_ids + sequence.output_token_ids for sequence in hot]
    drafted.clear()

    params = SamplingParams(temperature=0)
    hits = one.engine.stats().prefix_cache_hits
    for number, text in enumerate(texts):
        text = text[: CONTEXT - 8]
        answers(one.engine, [Sequence(f"on {number}", text, params, frozenset(), 8, 0)])

    assert one.engine.stats().prefix_cache_hits > hits
    one.twin.assert_drafts(drafted, 30)


@of(CASES)
def test_drawn_drafts_are_those_of_the_twin_where_one_token_is_left(one, drafted):
    """By the sampler that draws among all tokens, of which a head may draft some."""

    answers(one.engine, requests(2, 6, one.engine.limits.vocab_size, temperature=1.0, top_k=1))

    one.twin.assert_drafts(drafted, 60)


@of(CASES)
def test_drafts_after_failing_steps_are_those_of_the_twin(one, drafted, monkeypatch):
    """All pages are new, and the sequences' are computed again."""
    fail_now_and_then(one.engine, monkeypatch, every=8, most_rows=5)
    before = one.engine.stats()

    answers(one.engine, requests(3, 16, one.engine.limits.vocab_size))

    assert one.engine.stats().failed_steps > before.failed_steps
    one.twin.assert_drafts(drafted, 100)


@of(CASES | OTHERS)
def test_who_is_not_in_a_failing_step_is_given_the_same(one, monkeypatch):
    """The head's pages are lost with the model's."""
    assert_the_same_beside_failing_steps(one.engine, one.engine, monkeypatch)


@of({name: CASES[name] for name in SOME})
def test_a_head_follows_its_model_to_other_weights(one, drafted):
    """Their hidden states, and their embedding if it has none; the model has its own again after this."""
    twin = one.twin
    for seed in (9, twin.seed):
        twin.change(seed)
        one.engine.update_weights(one.engine.stage_weights(WeightArrays(twin.tensors)))
        drafted.clear()

        answers(one.engine, requests(5, 6, one.engine.limits.vocab_size))

        twin.assert_drafts(drafted, 60)


@of(CASES)
def test_with_wrong_pages_drafts_are_not_those_of_the_twin(one, drafted):
    """So the tests above would see it: of keys and values, and of features."""
    for spoilt in (0, -1):
        drafted.clear()
        for sequence in requests(4, 4, one.engine.limits.vocab_size):
            one.engine.add(sequence)
        while one.engine.has_work:
            executor = one.engine._runner._executor
            arrays = list(executor._cache.draft)
            arrays[spoilt] = jax.tree.map(jnp.zeros_like, arrays[spoilt])
            executor._cache = replace(executor._cache, draft=tuple(arrays))
            one.engine.step()
        one.engine.reset_prefix_cache()
        with pytest.raises(AssertionError, match="behind"):
            one.twin.assert_drafts(drafted, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 5])
def test_programs_of_few_rows_draft_for_them(tmp_path, monkeypatch, rows):
    """Steps of all sizes."""
    model, head = build_target(tmp_path / "model", "authors"), build_head(tmp_path / "head", "authors")
    sizes = {
        "max_num_seqs": 12,
        "max_num_batched_tokens": 16,
        "page_size": 16,
        "num_pages": 60,
        "max_model_len": CONTEXT,
    }
    engine = engine_of(EngineConfig(model=str(model), speculative_config=config_of(head), **sizes), lambda _: None)
    engine._scheduler.speculation._seconds = lambda _tokens, _passes: None
    drafted = watched(engine, monkeypatch)

    answers(engine, requests(6, 8, engine.limits.vocab_size), at_once=rows)

    EagleTwin("authors").assert_drafts(drafted, 200)
    assert engine.stats().compilations_after_ready == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.thorough if name in ("authors", "mtp of GLM", "assistant") else pytest.mark.exhaustive,
        )
        for name in ("authors", *PREDICTORS, *ASSISTANTS)
    ],
)
def test_an_engine_drafts_what_torch_does(tmp_path, monkeypatch, name):
    """All of a head's drafts for the same texts, chained."""
    model, _, config = built(tmp_path, name)
    engine = build_engine(model, config, num_pages=40)
    drafted, expected, texts = watched(engine, monkeypatch), {}, {}
    cases = json.loads((GOLDENS / f"{name.replace(' ', '_')}.json").read_text())["cases"]
    params = SamplingParams(temperature=0)
    for number, case in enumerate(cases):
        prompt, tokens = case["prompt"], case["tokens"]
        expected |= {(*prompt, *tokens[: 1 + count]): drafts for count, drafts in enumerate(case["drafts"])}
        texts[str(number)] = Sequence(str(number), prompt, params, frozenset(), len(tokens), 0)

    got = answers(engine, list(texts.values()))

    assert [got[str(number)][0] for number in range(len(cases))] == [case["tokens"] for case in cases]
    clear = [(drafts[: len(expected[text])], expected[text][: len(drafts)]) for text, drafts in drafted]
    assert sum(len(theirs) for _, theirs in clear) > 60
    assert all(ours == theirs for ours, theirs in clear)
    assert engine.stats().compilations_after_ready == 0
