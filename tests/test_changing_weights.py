"""Weights that change while requests run, beside all else that an engine does: whose keys, tokens and pages are whose."""

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from adapter_files import LINEAR, AdapterKind, write_adapter
from checkpoints import VARIANTS, build_checkpoint, write_tensors
from every_third import EveryThird
from plain_llama import PlainLlama
from poisoned_engines import turns
from test_live_weights import PROMPT, World, build, loaded, run, sequence, served, tensors_of, update, wake

from engine import served_model
from engine.live.weight_source import WeightArrays, WeightFiles
from engine.models.weights.store import entries
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.backend_choice import xla_backend

TOLERANCE = 1e-4
VOCABULARY = 144
Given = list[tuple[int, Any]]
"""Tokens with their log-probabilities."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two checkpoints and their engines, for all tests of this file."""
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run their layers by ``lax.scan``, as on a TPU, over weights that are stacked."""
    choose = served_model.choose_backend

    def choosing(*arguments: Any, **options: Any) -> Any:
        backend = choose(*arguments, **options)
        latents = options.get("latents", False)
        return replace(xla_backend(np.dtype(np.float32), latents=latents), scans=True, layout=backend.layout)

    monkeypatch.setattr(served_model, "choose_backend", choosing)


def until(engine: oEngine, count: int) -> list[Any]:
    """Steps until so many tokens have come, and none is in flight; what has come."""
    outputs: list[Any] = []
    while sum(len(output.token_ids) for output in outputs) < count:
        outputs += engine.step()
    return outputs + engine.settle()


def changed_in_the_middle(engine: oEngine, source: Any, asked: Sequence, **how: Any) -> tuple[int, Given]:
    """The tokens of a request, and how many of them came before the weights changed."""
    engine.add(asked)
    outputs = until(engine, 3)
    before = sum(len(output.token_ids) for output in outputs)
    outputs += update(engine, source, **how)
    return before, run(engine, outputs)[asked.request_id]


def assert_next(oracle: oEngine, known: list[int], given: tuple[int, Any], **others: Any) -> None:
    """A token is the one that an engine gives next, with its log-probabilities."""
    oracle.reset_prefix_cache()
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=1, **others.pop("params", {}))
    oracle.add(Sequence("one", list(known), params, frozenset(), 1, seed=0, **others))
    ((token, logprobs),) = run(oracle)["one"]
    assert given[0] == token
    np.testing.assert_allclose(given[1].logprobs, logprobs.logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_with_keep_cache_each_token_keeps_the_keys_that_its_own_weights_made(
    world: World, run_ahead: int, seed: int
) -> None:
    """Against Llama in numpy, whose every token is computed with the weights that were served when it was: in prompts,
    after them, and in prefixes that another request finds."""
    checkpoints = [tensors_of("llama2", number) for number in (1, 2)]
    engine, rng = world.engine(run_ahead=run_ahead), random.Random(seed)
    prompts = {"a": PROMPT, "b": [*PROMPT[:6], 1, 2, 77], "c": list(range(3, 15))}
    running = {name: sequence(name, prompt, 12) for name, prompt in prompts.items()}
    made_by: dict[str, list[int]] = {name: [] for name in running}
    pages: dict[tuple[int, ...], list[int]] = {}
    for asked in running.values():
        engine.add(asked)
    which, outputs, changes = 0, [], 0

    def note() -> None:
        """Which weights each computed token had, and those of each whole page."""
        for name, asked in running.items():
            known, versions = asked.prompt_token_ids + asked.output_token_ids, made_by[name]
            found = asked.num_computed_tokens if asked.status.name != "FINISHED" else len(known) - 1
            if not versions and asked.num_cached_tokens:
                versions += pages[tuple(known[: asked.num_cached_tokens])]
            versions += [which] * (found - len(versions))
            for end in range(4, len(versions) + 1, 4):
                pages.setdefault(tuple(known[:end]), versions[:end])

    while engine.has_work:
        outputs += engine.step()
        if rng.random() < 0.4:
            outputs += engine.settle()
            note()
            engine.update_weights(engine.stage_weights(WeightArrays(checkpoints[1 - which])), keep_cache=True)
            which, changes = 1 - which, changes + 1
    note()
    found = run(engine, outputs)

    assert changes > 3 and any(0 < sum(versions) < len(versions) for versions in made_by.values())
    for name, asked in running.items():
        plain, known = PlainLlama(VARIANTS["llama2"].config), asked.prompt_token_ids + asked.output_token_ids
        expected = [plain.add(token, checkpoints[by]) for token, by in zip(known[:-1], made_by[name], strict=True)]
        for at, (token, logprobs) in enumerate(found[name]):
            row = expected[len(asked.prompt_token_ids) - 1 + at]
            assert token == row.argmax()
            np.testing.assert_allclose(logprobs.logprobs, row[logprobs.token_ids], atol=TOLERANCE, rtol=0)


@pytest.mark.thorough
@pytest.mark.usefixtures("scanned")
@pytest.mark.parametrize(
    ("variant", "settings"), [("gemma3", {}), ("llama2", {"quantization": "int8"}), ("qwen3_next", {})]
)
def test_layers_in_stacks_change_where_they_lie(tmp_path: Path, variant: str, settings: dict[str, Any]) -> None:
    """All weights in mid-stream, and then some tensors alone, of one layer of a stack: as if they had been loaded so."""
    first, second = (build_checkpoint(tmp_path / str(seed), variant, seed=seed) for seed in (1, 2))
    engine, oracle = build(first, **settings), build(second, **settings)
    assert any(entry.is_stacked for entry in _entries(engine))

    before, given = changed_in_the_middle(engine, WeightFiles(str(second)), sequence("a"))

    known = PROMPT + [token for token, _ in given]
    for at in range(before, len(given)):
        assert_next(oracle, known[: len(PROMPT) + at], given[at])
    _assert_served(engine, second, settings)
    others, tensors = tensors_of(variant, 3), tensors_of(variant, 2)
    for ending in (
        "layers.1.self_attn.q_proj.weight",
        "layers.2.mlp.up_proj.weight",
        "layers.0.input_layernorm.weight",
    ):
        changed = {name: others[name] for name in others if name.endswith(ending)}
        if changed:
            update(engine, WeightArrays(changed))
            tensors |= changed
    build_checkpoint(tmp_path / "third", variant, seed=2)
    write_tensors(tmp_path / "third", tensors)
    _assert_served(engine, tmp_path / "third", settings)


@pytest.mark.thorough
@pytest.mark.parametrize(("variant", "quantization"), [("qwen3_moe", "int4"), ("mixtral", "int8")])
def test_quantised_experts_change_all_or_one_alone(tmp_path: Path, variant: str, quantization: str) -> None:
    """In mid-stream, and then a single expert's tensor, as if they had been loaded so."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128}
    first, second = (build_checkpoint(tmp_path / str(seed), variant, seed=seed, **sizes) for seed in (1, 2))
    settings = {"quantization": quantization}
    engine, oracle = build(first, **settings), build(second, **settings)

    before, given = changed_in_the_middle(engine, WeightFiles(str(second)), sequence("a"))

    known = PROMPT + [token for token, _ in given]
    for at in range(before, len(given)):
        assert_next(oracle, known[: len(PROMPT) + at], given[at])
    _assert_served(engine, second, settings)
    others, tensors = tensors_of(variant, 3, **sizes), tensors_of(variant, 2, **sizes)
    experts = [name for name in others if "experts.2." in name]
    assert len(experts) > 2
    for name in experts[:2]:
        update(engine, WeightArrays({name: others[name]}))
        tensors[name] = others[name]
    write_tensors(second, tensors)
    _assert_served(engine, second, settings)


@pytest.mark.thorough
def test_an_adapter_stays_over_a_base_that_changes(tmp_path: Path) -> None:
    """A request with it and one without go on over the new base, with the same adapter."""
    first, second = (build_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    adapter = write_adapter(tmp_path / "adapter", "llama2", AdapterKind(LINEAR, 4))
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine, oracle = build(first, **settings), build(second, **settings)
    uids = []
    for each in (engine, oracle):
        read = each.read_adapter(str(adapter))
        each.add_adapter(read)
        uids.append(read.uid)
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=20)
    engine.add(sequence("plain", max_tokens=20))

    asked = Sequence("adapted", list(PROMPT), params, frozenset(), 20, seed=0, salt=b"1", adapter_id=uids[0])
    engine.add(asked)
    outputs = until(engine, 12)
    before = {
        name: sum(len(one.token_ids) for one in outputs if one.request_id == name) for name in ("plain", "adapted")
    }
    outputs += update(engine, WeightFiles(str(second)))
    found = run(engine, outputs)

    for name, adapter_id in (("plain", 0), ("adapted", uids[1])):
        known = PROMPT + [token for token, _ in found[name]]
        assert 0 < before[name] < len(found[name])
        for at in range(before[name], len(found[name])):
            others = {"adapter_id": adapter_id, "salt": b"1" if adapter_id else b""}
            assert_next(oracle, known[: len(PROMPT) + at], found[name][at], **others)
    assert [token for token, _ in found["plain"]] != [token for token, _ in found["adapted"]]


@pytest.mark.thorough
@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_structured_output_goes_on_in_its_form(world: World, run_ahead: int, keep_cache: bool) -> None:
    """Tokens before and after the change are of one form, and those after it the new weights' likeliest in it."""
    engine, oracle = world.engine(run_ahead=run_ahead), world.oracle(1)
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=9)
    asked = Sequence("a", list(PROMPT), params, frozenset(), 9, seed=0, constraint=EveryThird(VOCABULARY))

    before, given = changed_in_the_middle(engine, WeightFiles(str(world.checkpoints[1])), asked, keep_cache=keep_cache)

    assert 0 < before < len(given) == 9
    known = PROMPT + [token for token, _ in given]
    for at, (token, _) in enumerate(given):
        assert token % 3 == at % 3
        if at >= before and not keep_cache:
            allowed = list(range(at % 3, VOCABULARY, 3))
            assert_next(oracle, known[: len(PROMPT) + at], given[at], params={"allowed_token_ids": allowed})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("llama2", "update"),
        ("llama2", "sleep 1"),
        ("qwen3_5", "update asleep"),
        ("qwen3_5", "sleep 2"),
        ("qwen3_5", "wake weights first"),
    ],
)
def test_no_page_of_former_weights_comes_back_from_the_host(tmp_path: Path, variant: str, change: str) -> None:
    """Whatever the level of sleep; where the weights stay the same, and were never away, pages do come back."""
    first, second = (build_checkpoint(tmp_path / str(seed), variant, seed=seed) for seed in (1, 2))
    settings = {"num_pages": 20, "host_cache_gib": 2e-3, "max_model_len": 60}
    engine, oracle = build(first, **settings), build(first if change.startswith("sleep") else second, max_model_len=60)
    asked = [make() for make in turns(np.random.default_rng(3), talks=6, rounds=2)]

    def ask(engine: oEngine) -> dict[str, list[int]]:
        given = {}
        for one in asked:
            request = sequence(one.request_id, one.prompt_token_ids, one.max_tokens)
            request.salt = b""
            engine.add(request)
            given |= {name: [token for token, _ in tokens] for name, tokens in run(engine).items()}
        return given

    ask(engine)
    loaded_before = engine.stats().host_bytes_loaded
    assert engine.stats().host_pages_cached and loaded_before
    match change:
        case "update":
            update(engine, WeightFiles(str(second)))
        case "update asleep":
            engine.sleep(1)
            assert engine.stats().host_pages_cached
            update(engine, WeightFiles(str(second)))
            wake(engine)
        case "sleep 1":
            engine.sleep(1)
            wake(engine)
        case "sleep 2":
            engine.sleep(2)
            wake(engine)
        case "wake weights first":
            engine.sleep(2)
            wake(engine, pages=False)
            update(engine, WeightFiles(str(second)))
            wake(engine)

    kept = engine.stats().host_pages_cached
    assert bool(kept) == (change == "sleep 1")
    hits = engine.stats().host_cache_hits
    request = sequence("first", asked[-1].prompt_token_ids, 1)
    engine.add(request)
    run(engine)
    assert (engine.stats().host_cache_hits > hits) == (change == "sleep 1")
    assert ask(engine) == ask(oracle)


def _entries(engine: oEngine) -> Any:
    assert engine._residence._weights is not None
    return entries(engine._residence._weights._decoder)


def _assert_served(engine: oEngine, directory: Path, settings: dict[str, Any]) -> None:
    for ours, theirs in zip(served(engine), loaded(directory, **settings), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def resident() -> int:
    """Bytes of this process's memory, and of arrays of jax."""
    gc.collect()
    return psutil.Process().memory_info().rss


def of_jax() -> int:
    """Bytes of all arrays that are there."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 512}
CHANGES, SETTLED = 100, 60
"""Changes of the weights in one stream, and after how many of them memory is measured first: threads have their heaps then."""


@pytest.fixture
def large(tmp_path: Path) -> list[Path]:
    """Two checkpoints of 17 MB each, so that a copy of one that stays would show."""
    return [build_checkpoint(tmp_path / str(seed), seed=seed, **SIZES) for seed in (1, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arrays", [False, True], ids=["directory", "arrays"])
def test_a_hundred_changes_in_one_stream_leave_memory_flat(large: list[Path], arrays: bool) -> None:
    """Every token is that of the weights which were served when it was made, and nothing is compiled."""
    settings = {"max_model_len": 512, "page_size": 16, "max_num_batched_tokens": 64}
    oracles = [build(place, **settings) for place in large]
    engine = build(large[0], **settings)
    sources: list[Any] = [WeightFiles(str(place)) for place in large]
    if arrays:
        sources = [WeightArrays(tensors_of("llama2", seed, **SIZES)) for seed in (1, 2)]
    asked = sequence("a", PROMPT, 4 * CHANGES)
    made: list[tuple[int, int, Any]] = []
    compiled, which, changes, figures = engine.stats().compilations_after_ready, 0, 0, []
    engine.add(asked)

    while engine.has_work:
        outputs = until(engine, 2) if changes < CHANGES else engine.step()
        made += [
            (which, token, logprobs)
            for output in outputs
            for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
        ]
        if changes < CHANGES and engine.has_work:
            engine.update_weights(engine.stage_weights(sources[1 - which]), name=str(changes))
            which, changes = 1 - which, changes + 1
            if changes in (SETTLED, CHANGES):
                figures.append((resident(), of_jax()))

    assert changes == CHANGES and engine.stats().weight_version == 1 + CHANGES
    (rss, live), (rss_after, live_after) = figures
    print(
        f"after {SETTLED} and {CHANGES} changes: rss {rss:,} and {rss_after:,}, arrays of jax {live:,} and {live_after:,}"
    )
    assert live_after == live
    assert rss_after - rss < 17_000_000
    assert engine.stats().compilations_after_ready == compiled
    known = list(PROMPT)
    for version, token, logprobs in made:
        assert_next(oracles[version], known, (token, logprobs))
        known.append(token)
