"""Weights that change under an engine: the tokens of the new ones, and all or nothing."""

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import VARIANTS, Tensors, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from mtp_checkpoints import PREDICTORS, build_predicting, predicting_tensors
from mtp_checkpoints import SPECULATION as OF_LAYER
from numpy.typing import NDArray

from engine import served_model as served_models
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.live.live_weights import LiveWeights
from engine.live.weight_source import SharedArray, SharedWeights, WeightArrays, WeightFiles
from engine.models.weights.sources.tensor_source import Arrays
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput
from engine.served_model import served_model

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 4, "page_size": 4, "staged_readiness": True
}  # fmt: skip
PROMPT = [5, 9, 3, 7, 2, 8, 4, 11, 6]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
Q_PROJ = "model.layers.{}.self_attn.q_proj.weight"


def build(directory: Path, **settings: Any) -> oEngine:
    """The smallest engine that has more than one of everything but the sizes of its steps."""
    return build_engine(EngineConfig(**(DEFAULTS | {"model": str(directory)} | settings)), lambda _: None)


def sequence(name: str, prompt: list[int] = PROMPT, max_tokens: int = 6) -> Sequence:
    """Greedy, with log-probabilities, and sharing prefixes with all others."""
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=max_tokens)
    return Sequence(name, list(prompt), params, frozenset(), max_tokens, seed=0, salt=b"")


def run(engine: oEngine, outputs: list[SequenceOutput] | None = None) -> dict[str, list[tuple[int, Any]]]:
    """Every token with its log-probabilities, by sequence, of an engine that works to its end."""
    outputs = [] if outputs is None else outputs
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    found: dict[str, list[tuple[int, Any]]] = {}
    for output in outputs:
        assert output.error is None, output.error
        found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs, strict=True))
    return found


def answer(engine: oEngine, prompt: list[int] = PROMPT) -> list[tuple[int, Any]]:
    """What an idle engine says to a prompt."""
    engine.add(sequence("one", prompt))
    return run(engine)["one"]


def update(engine: oEngine, source: Any, **how: Any) -> list[SequenceOutput]:
    """As the driver does it; what was in flight."""
    staged = engine.stage_weights(source)
    outputs = engine.settle()
    engine.update_weights(staged, **how)
    return outputs


def wake(engine: oEngine, *, pages: bool = True) -> None:
    """As the driver does it: what is missing is read beside it."""
    missing = engine.missing_weights
    engine.wake(None if missing is None else engine.stage_weights(missing), pages=pages)


def tensors_of(variant: str, seed: int, **overrides: Any) -> Tensors:
    """Of a checkpoint that ``build_checkpoint`` writes."""
    return random_tensors({**VARIANTS[variant].config, **overrides}, seed)


def served(engine: oEngine) -> list[NDArray[Any]]:
    """All arrays of the weights."""
    assert engine._residence._weights is not None
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(engine._residence._weights._decoder))]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The events of XLA's compiler, also of those that the engine does not count."""
    events: list[str] = []
    on = threading.Event()
    on.set()

    def listen(event: str, _: float, **__: Any) -> None:
        if on.is_set() and event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    on.clear()


class World:
    """Checkpoints of one model, and their engines, each built once: that compiles it."""

    def __init__(self, place: Path) -> None:
        self.checkpoints = [build_checkpoint(place / str(seed), seed=seed) for seed in (1, 2)]
        self._engines: dict[Any, oEngine] = {}

    def engine(self, **settings: Any) -> oEngine:
        """One with the first weights, which a test may change."""
        engine = self._built(0, "changing", settings)
        update(engine, WeightFiles(str(self.checkpoints[0])))
        return engine

    def next(self, which: int, tokens: list[int]) -> tuple[int, Any]:
        """The token that follows these by a checkpoint, with its log-probabilities, by an engine of its own."""
        engine = self.oracle(which)
        engine.reset_prefix_cache()
        engine.add(sequence("one", tokens, 1))
        return run(engine)["one"][0]

    def oracle(self, which: int) -> oEngine:
        """One with the weights of a checkpoint, which never change."""
        return self._built(which, "constant", {})

    def _built(self, which: int, use: str, settings: dict[str, Any]) -> oEngine:
        key = which, use, *settings.items()
        if key not in self._engines:
            self._engines[key] = build(self.checkpoints[which], **settings)
        return self._engines[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its engines are for all tests of this file."""
    return World(tmp_path_factory.mktemp("world"))


def loaded(directory: Path, **settings: Any) -> list[NDArray[Any]]:
    """All arrays of a checkpoint's weights as an engine loads them."""
    served = served_model(EngineConfig(**(DEFAULTS | {"model": str(directory)} | settings)))
    decoder = served.abstract()
    served.load(decoder, lambda done, total: None)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(decoder))]


def assert_same(ours: list[NDArray[Any]], theirs: list[NDArray[Any]]) -> None:
    """Bit for bit."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_after_an_update_an_engine_is_one_that_was_loaded_so(world: World, compiled: list[str]) -> None:
    """All weights, from a directory: tokens and log-probabilities are a fresh engine's, and nothing is compiled."""
    engine, wanted = world.engine(), answer(world.oracle(1))
    before, version = answer(engine), engine.stats().weight_version
    assert before == answer(world.oracle(0)) != wanted
    compiled.clear()

    update(engine, WeightFiles(str(world.checkpoints[1])), name="better")

    assert answer(engine) == wanted
    assert_same(served(engine), loaded(world.checkpoints[1]))
    assert not compiled, compiled
    assert (engine.stats().weight_version, engine.stats().weight_name) == (version + 1, "better")


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        pytest.param("qwen2", {"quantization": "int8"}, marks=pytest.mark.thorough),
        pytest.param("llama2", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param("gemma2", {"dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
    ],
)
def test_so_it_is_in_other_forms(tmp_path: Path, compiled: list[str], variant: str, settings: dict[str, Any]) -> None:
    """Quantised, of several devices, in fewer bits."""
    first, second = (build_checkpoint(tmp_path / str(seed), variant, seed=seed) for seed in (1, 2))
    engine, fresh = build(first, **settings), build(second, **settings)
    wanted = answer(fresh)
    assert answer(engine) != wanted
    compiled.clear()

    update(engine, WeightFiles(str(second)))

    assert answer(engine) == wanted
    assert_same(served(engine), served(fresh))
    assert not compiled, compiled


PARTS = {
    "q alone": [Q_PROJ.format(1)],
    "gate of one layer, up of another": ["model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    "k and v, a norm": [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.norm.weight",
    ],
    "the embedding": ["model.embed_tokens.weight"],
}


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama2", {}),
        pytest.param("llama2", {"quantization": "int8"}, marks=pytest.mark.exhaustive),
        pytest.param("llama2", {"quantization": "int4"}, marks=pytest.mark.exhaustive),
        pytest.param("llama2", {"quantization": "w8a8"}, marks=pytest.mark.thorough),
        pytest.param("llama2", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param("llama2", {"tensor_parallel_size": 2, "quantization": "int4"}, marks=pytest.mark.thorough),
        pytest.param("qwen2", {}, marks=pytest.mark.exhaustive),
        pytest.param("gemma2", {}, marks=pytest.mark.thorough),
    ],
)
def test_some_tensors_alone_change_as_if_all_had_been_loaded(
    world: World, tmp_path: Path, variant: str, settings: dict[str, Any]
) -> None:
    """Where several tensors are one array, quantised or not, each is written to its part of it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128} if settings.get("quantization") == "int4" else {}
    directory = build_checkpoint(tmp_path / "first", variant, seed=1, **sizes)
    tensors, others = (tensors_of(variant, seed, **sizes) for seed in (1, 2))
    plain = variant == "llama2" and not settings
    engine = world.engine() if plain else build(directory, **settings)

    for names in PARTS.values():
        changed = {name: others[name] for name in names if name in others}
        tensors |= changed
        update(engine, WeightArrays(changed))

        write_tensors(directory, tensors)
        assert_same(served(engine), loaded(directory, **settings))


def test_the_text_model_alone_replaces_that_of_a_checkpoint_with_other_parts(tmp_path: Path) -> None:
    """As a trainer saves it that has dropped the vision tower; its config.json is the text model's."""
    beside = build_checkpoint(tmp_path / "beside", "mistral_vision")
    text = json.loads((beside / "config.json").read_bytes())["text_config"]
    alone = build_checkpoint(tmp_path / "alone", "mistral_vision", seed=5)
    (alone / "config.json").write_text(json.dumps(text))
    write_tensors(alone, random_tensors(text, 5))
    engine = build(beside)

    update(engine, WeightFiles(str(alone)))

    assert_same(served(engine), loaded(alone))


def spoilt(tensors: Tensors, name: str, place: tuple[int, ...], value: float) -> Tensors:
    """The same with one other number."""
    array = tensors[name].copy()
    array[place] = value
    return {**tensors, name: array}


def test_weights_that_do_not_fit_change_nothing(world: World, tmp_path: Path) -> None:
    """Whatever is wrong with them, and be it in the last tensor: the refusal says what."""
    engine, others = world.engine(), tensors_of("llama2", 2)
    before, version = served(engine), engine.stats().weight_version
    q, last = Q_PROJ.format(0), list(others)[-1]
    file = build_checkpoint(tmp_path / "second", seed=2) / "model.safetensors"
    refused: list[tuple[Any, str]] = [
        (WeightArrays({**others, "model.unheard_of": others[q]}), "model.unheard_of is in the checkpoint, but"),
        (WeightArrays({**others, q: others[q][1:]}), f"{q} has shape"),
        (WeightArrays({q: others[q].astype(np.int8)}), f"{q} is stored as I8"),
        (WeightArrays({q: others[q].astype(np.complex64)}), f"{q} is stored as complex64"),
        (WeightArrays(spoilt(others, last, (0,), np.nan)), f"{last} holds NaN"),
        (WeightArrays(spoilt(others, q, (0, 0), -np.inf)), f"{q} holds NaN or infinity"),
        (WeightArrays({}), "has no tensor of the model"),
        (WeightFiles(str(tmp_path / "nowhere")), "neither model.safetensors nor"),
        (WeightFiles(str(build_checkpoint(tmp_path / "other", rope_theta=1234.0))), "describes another model"),
        (
            WeightFiles(str(build_checkpoint(tmp_path / "gptq", quantization_config=GPTQ))),
            "another quantization_config",
        ),
        (WeightFiles(str(tmp_path / ("x" * 300))), "the weights cannot be read: .*File name too long"),
        (SharedWeights({q: SharedArray("../etc/passwd", 0, "F32", [1])}), "no name of shared memory"),
        (SharedWeights({q: SharedArray("odriver-nobody", 0, "F32", [1])}), "cannot be opened"),
    ]
    for size in (file.stat().st_size - 1, 1000, 7):
        cut = tmp_path / str(size)
        build_checkpoint(cut, seed=2)
        (cut / "model.safetensors").write_bytes(file.read_bytes()[:size])
        refused.append((WeightFiles(str(cut)), "is no safetensors file|ends"))

    for source, why in refused:
        with pytest.raises(ConfigurationError, match=why):
            update(engine, source)

    assert_same(served(engine), before)
    assert engine.stats().weight_version == version


def test_weights_are_read_that_were_saved_without_the_layer_that_predicts(tmp_path: Path) -> None:
    """A trainer keeps neither it nor its key in config.json. It is no part of the model, which is all there."""
    name, predictor = "mtp of Qwen3.5", PREDICTORS["mtp of Qwen3.5"]
    model = served_model(
        EngineConfig(model=str(build_predicting(tmp_path / "model", name)), speculative_config=OF_LAYER)
    )
    saved = build_checkpoint(tmp_path / "saved", predictor.variant, **{**predictor.config, "mtp_num_hidden_layers": 0})
    weights = LiveWeights(model, model.abstract_all().model)

    with weights.open(WeightFiles(str(saved))) as tensors:
        staged = weights.stage(0, tensors, WeightFiles(str(saved)))

    assert staged.is_whole
    layer = Arrays({"mtp.fc.weight": predicting_tensors(name)["mtp.fc.weight"]})
    with pytest.raises(ConfigurationError, match="has no tensor of the model"):
        weights.stage(1, layer)


@pytest.mark.parametrize(
    ("run_ahead", "settings", "changes"),
    [
        (1, {}, 5),
        pytest.param(0, {}, 30, marks=pytest.mark.thorough),
        pytest.param(2, {}, 30, marks=pytest.mark.thorough),
        pytest.param(3, {"num_pages": 14}, 30, marks=pytest.mark.thorough),
        pytest.param(1, {"host_cache_gib": 1e-3}, 30, marks=pytest.mark.thorough),
    ],
)
def test_every_token_is_one_of_the_weights_that_were_served_when_it_was_made(
    world: World, run_ahead: int, settings: dict[str, Any], changes: int
) -> None:
    """Weights change between any two steps, in prompts and after them; what is computed is computed again."""
    for version in (0, 1):
        world.oracle(version)  # first, as it compiles
    engine = world.engine(**({"run_ahead": run_ahead} | settings if (run_ahead, settings) != (1, {}) else {}))
    before, rng = engine.stats(), random.Random(0)
    prompts = {"a": PROMPT, "b": [*PROMPT[:5], 1, 2], "c": list(range(3, 15))}
    for name, prompt in prompts.items():
        engine.add(sequence(name, prompt, 6 if changes == 5 else 40))
    made: dict[str, list[tuple[int, int, Any]]] = {name: [] for name in prompts}
    which, new, staged = 0, 0, None

    while engine.has_work:
        outputs = engine.step()
        new += len(outputs)
        # Mostly behind a token, so that the requests advance; at times in the middle of a prompt.
        if changes and rng.random() < (0.7 if new else 0.05):
            staged = engine.stage_weights(WeightFiles(str(world.checkpoints[1 - which])))
            outputs += engine.settle()
        for output in outputs:
            for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
                made[output.request_id].append((which, token, logprobs))
        if changes and staged is not None:
            engine.update_weights(staged)
            engine.check_integrity()
            which, new, changes = 1 - which, 0, changes - 1
        staged = None

    assert not changes
    assert {version for tokens in made.values() for version, _, _ in tokens} == {0, 1}
    for name, tokens in made.items():
        known = list(prompts[name])
        for version, token, logprobs in tokens:
            wanted, theirs = world.next(version, known)
            assert token == wanted
            # Rounding depends on how many rows a step has, and where prompts are cut; other weights are tenths away.
            np.testing.assert_allclose(logprobs.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
            known.append(token)
    stats = engine.stats()
    assert (stats.pages_owned, stats.compilations_after_ready) == (0, before.compilations_after_ready)


def test_weights_and_pages_that_slept_come_back(world: World) -> None:
    """At level 2 the devices hold neither; the weights come from their source, or by an update of them all."""
    engine, version = world.engine(), world.engine().stats().weight_version
    wanted, others = (answer(world.oracle(which)) for which in (0, 1))

    engine.sleep(2)
    assert engine.stats().asleep and not engine.stats().has_weights
    q = Q_PROJ.format(0)
    with pytest.raises(ConfigurationError, match="sleeps without the others"):
        update(engine, WeightArrays({q: tensors_of("llama2", 2)[q]}))
    wake(engine, pages=False)
    assert engine.stats().asleep and engine.stats().has_weights
    wake(engine)
    assert answer(engine) == wanted

    engine.sleep(2)
    update(engine, WeightFiles(str(world.checkpoints[1])), name="better")
    wake(engine)
    assert answer(engine) == others
    engine.sleep(2)
    wake(engine)
    assert answer(engine) == others
    assert (engine.stats().weight_version, engine.stats().weight_name) == (version + 3, "better")

    (file := world.checkpoints[1] / "model.safetensors").rename(file.with_suffix(".away"))
    try:
        engine.sleep(2)
        with pytest.raises(ConfigurationError, match="neither model"):
            wake(engine)
        assert engine.stats().asleep and not engine.stats().has_weights and not engine.stats().awaits_weights
    finally:
        file.with_suffix(".away").rename(file)
    wake(engine)
    assert answer(engine) == others


@pytest.mark.thorough
def test_room_that_an_update_makes_after_a_sleep_is_no_unplanned_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers that are stacked, as on a TPU, over several devices: functions that are compiled then make it."""
    chosen = served_models.choose_backend
    monkeypatch.setattr(
        served_models, "choose_backend", lambda *sizes, **how: replace(chosen(*sizes, **how), scans=True)
    )
    directory = build_checkpoint(tmp_path, "llama2")
    engine = build(directory, tensor_parallel_size=2, staged_readiness=False)
    wanted, before = answer(engine), engine.stats().compilations_after_ready

    engine.sleep(2)
    update(engine, WeightFiles(str(directory)))
    wake(engine)

    assert answer(engine) == wanted
    assert engine.stats().compilations_after_ready == before


def test_weights_that_came_as_arrays_do_not_come_back_by_themselves(world: World) -> None:
    """A sleep at level 2 loses them: the engine has its pages then, and says that it waits for all weights."""
    engine, others = world.engine(), answer(world.oracle(1))
    update(engine, WeightArrays(tensors_of("llama2", 2)))
    assert answer(engine) == others

    engine.sleep(2)
    wake(engine)

    stats = engine.stats()
    assert (stats.asleep, stats.has_pages, stats.has_weights, stats.awaits_weights) == (True, True, False, True)
    update(engine, WeightArrays(tensors_of("llama2", 2)))
    assert not engine.stats().asleep and not engine.stats().awaits_weights
    assert answer(engine) == others
