"""Draft heads of EAGLE-3, and layers that predict further tokens: their arithmetic against torch, what is kept of a page's tokens for them, and what does not fit."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistant_checkpoints import ASSISTANTS, build_assistant, build_assisted
from checkpoints import build_checkpoint, random_tensors, write_tensors
from flax import nnx
from head_checkpoints import HEADS, build_head, build_target, head_tensors, write
from hypothesis import given
from hypothesis import strategies as st
from loading import load
from mtp_checkpoints import PREDICTORS, SPECULATION, build_predicting, predicting_tensors
from plain_attention import DenseAttention
from test_latents import BLOCKS_OF_FP8, in_blocks_of_fp8

from caching.attention.spec import PageTable
from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.hub.obtain import with_draft_directory
from engine.models.heads.head_config import read_head
from engine.models.heads.mtp_layer import mtp_head
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.rope import rotations
from engine.models.step_context import StepContext
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import load_decoder
from engine.models.weights.weight_format import WeightFormat
from engine.served_model import served_model
from engine.speculation.feature_pages import FeaturePages

GOLDENS = Path(__file__).parent / "goldens" / "heads"
DEFAULT = ("authors", "mtp of DeepSeek")
LENGTH = 64
"""Tokens of the longest golden, or more."""


def config_of(head, **keys):
    """The setting, as JSON."""
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, **keys})


def read(directory, name, **overrides):
    """A head for its model."""
    model = read_model_config(build_target(directory / "model", name))
    return read_head(build_head(directory / "head", name, **overrides), model, name)


def built(directory, name):
    """The directories of a model and of its head, and the setting: a head of its own, an assistant, or a layer of the model's
    checkpoint."""
    if name in ASSISTANTS:
        head = build_assistant(directory / "head", name)
        return build_assisted(directory / "model", name), head, config_of(head, method="mtp")
    if name in PREDICTORS:
        model = build_predicting(directory / "model", name)
        return model, model, SPECULATION
    head = build_head(directory / "head", name)
    return build_target(directory / "model", name), head, config_of(head)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.thorough) for name in (*HEADS, *PREDICTORS)],
)
def test_a_head_drafts_what_torch_does(name, tmp_path):
    """What follows each beginning of a text, from hidden states that are tapped of the model."""
    model, directory, _ = built(tmp_path, name)
    decoder, mesh = load(model), DeviceMesh((jax.local_devices()[0],))
    spec = decoder.partition.model
    partition = split(mtp_head(spec) if name in PREDICTORS else read_head(directory, spec, name), 1)
    form = WeightFormat(np.dtype(np.float32))
    head = load_decoder(open_checkpoint(directory), partition, form, mesh=mesh, progress=lambda *_: None)
    assert partition.model.head.taps == (() if name in PREDICTORS else HEADS[name].taps)
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]

    @jax.jit
    def drafts_of(text):
        steps = [StepContext(rotations(of.partition.model, positions), DenseAttention()) for of in (decoder, head)]
        caches = [None] * decoder.partition.model.num_layers
        _, normed, taps = decoder.tapped(text, caches, steps[0], partition.model.head.taps)
        features, shared = jnp.roll(head.features(normed, taps), 1, axis=1), head.shared(decoder)
        _, hidden = head(text, positions, features, [None], steps[1], shared)
        return head.token_ids(jnp.argmax(head.logits(hidden[0], shared), axis=-1).astype(jnp.int32))

    for case in json.loads((GOLDENS / f"{name.replace(' ', '_')}.json").read_text())["cases"]:
        begin, text = len(case["prompt"]), case["prompt"] + case["tokens"]

        drafts = drafts_of(jnp.array([text + [0] * (LENGTH - len(text))], jnp.int32))

        expected = [each[0] if each else None for each in case["drafts"]]
        compared = zip(drafts[begin : len(text)].tolist(), expected, strict=True)
        compared = [pair for pair in compared if pair[1] is not None]
        assert len(compared) > 20 and all(ours == theirs for ours, theirs in compared)


def test_a_model_without_a_layer_that_predicts_is_refused_beside_mtp(tmp_path):
    """By name, with what it has, before anything is loaded."""
    missing = build_predicting(tmp_path / "missing", "mtp of GLM")
    write_tensors(missing, random_tensors(PREDICTORS["mtp of GLM"].config, 0))
    for directory, why in (
        (build_checkpoint(tmp_path / "llama", "llama2"), "this model has none: choose another method"),
        (build_checkpoint(tmp_path / "none", "glm4_moe", num_nextn_predict_layers=0), "this model has none"),
        (
            build_checkpoint(tmp_path / "two", "glm4_moe", num_nextn_predict_layers=2),
            "has 2 of them, and supported is one",
        ),
        (build_checkpoint(tmp_path / "granite", "granite_hybrid"), "this model has none"),
        (build_checkpoint(tmp_path / "qwen", "qwen3_next"), r"its weights have no mtp\.\*"),
        (missing, r"its weights have no model\.layers\.2\.\*, that layer"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            served_model(EngineConfig(model=str(directory), speculative_config=SPECULATION))


def test_the_layer_that_predicts_has_experts_wherever_the_model_has_them(tmp_path):
    """Also behind a last layer without any."""
    types = ["dense", "sparse", "sparse", "dense"]
    directory = build_checkpoint(tmp_path, "glm4_moe_lite", mlp_layer_types=types, num_nextn_predict_layers=1)
    model = read_model_config(directory)

    (block,) = mtp_head(model).blocks

    assert block.feed_forward == model.blocks[2].feed_forward != model.blocks[3].feed_forward


def test_the_layer_of_a_checkpoint_that_drafts_is_not_said_to_be_left_out(tmp_path):
    """Without the setting it is; with it the model is the same, and its pages have one layer more."""
    directory = str(build_predicting(tmp_path, "mtp of DeepSeek"))
    plain = served_model(EngineConfig(model=directory))
    ours = served_model(EngineConfig(model=directory, speculative_config=SPECULATION))

    assert plain.describe()["not served"] == "layers that predict further tokens"
    assert "not served" not in ours.describe() and ours.partition == plain.partition
    assert (
        ours.draft.footprint.weight_bytes > 0
        and ours.footprint.resident_bytes == plain.footprint.resident_bytes + ours.draft.footprint.weight_bytes
    )
    tail = ours.footprint.one_page.of_draft.tail
    more = plain.footprint.one_page.bytes_per_page // plain.model.num_layers + tail.num_bytes
    assert ours.footprint.one_page.bytes_per_page == plain.footprint.one_page.bytes_per_page + more
    assert (tail.rows, tail.size) == (4, plain.model.hidden_size)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_a_layer_in_blocks_of_fp8_is_read_as_what_it_stands_for(tmp_path, devices):
    """As DeepSeek-V3 is published, its layer that predicts further tokens too."""
    model = read_model_config(build_predicting(tmp_path, "mtp of DeepSeek"))
    stored, meant = in_blocks_of_fp8(predicting_tensors("mtp of DeepSeek"))
    form, mesh = WeightFormat(np.dtype(np.float32)), DeviceMesh(tuple(jax.devices()[:devices]))

    read, expected = (
        load_decoder(Arrays(tensors), split(mtp_head(spec), devices), form, mesh=mesh, progress=lambda *_: None)
        for tensors, spec in ((stored, replace(model, published=BLOCKS_OF_FP8)), (meant, model))
    )

    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(expected))
    assert np.abs(np.asarray(jax.tree.leaves(read.joint.get_value())[0])).max() > 0.1


PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 4, 5, 12, 3


@partial(jax.jit, static_argnums=0)
def shifted(pages, kept, features, positions, table):
    """What FORWARD does in each step."""
    return pages.shifted(kept, features, positions, table)


@given(data=st.data(), num_drafts=st.sampled_from([1, 2, 5]))
def test_each_token_finds_the_feature_of_the_one_before(data, num_drafts):
    """Whatever was fed in between: chunks, drafts that were wrong, and pages that another row fills in the same step."""
    rows = min(1 + num_drafts, PAGE_SIZE)
    pages = FeaturePages(PAGE_SIZE, 1 + ROWS * PAGES_PER_SEQ, rows)
    kept = jnp.zeros((rows * pages.num_pages, 1), jnp.float32)
    tables = 1 + np.arange(ROWS * PAGES_PER_SEQ, dtype=np.int32).reshape(ROWS, PAGES_PER_SEQ)
    lens, ends, number, texts = [0] * ROWS, [0] * ROWS, 0, [{} for _ in range(ROWS)]
    for _ in range(data.draw(st.integers(1, 8))):
        features, positions, begins = np.zeros((TOKENS, 1), np.float32), np.zeros(TOKENS, np.int32), [0]
        expected, used = dict[int, float](), list[int]()
        for row in range(ROWS):
            held = lens[0] // PAGE_SIZE
            if row and lens[row] == 0 and held and data.draw(st.booleans()):
                tables[row, :held] = tables[0, :held]
                lens[row], texts[row] = held * PAGE_SIZE, {at: texts[0][at] for at in range(held * PAGE_SIZE)}
            count = data.draw(st.integers(0, min(TOKENS - begins[-1], PAGE_SIZE * PAGES_PER_SEQ - lens[row])))
            if not count:
                continue
            for at in range(lens[row], lens[row] + count):
                number, token = number + 1, begins[-1] + at - lens[row]
                expected[token] = texts[row].get(at - 1, 0.0)
                features[token], positions[token], texts[row][at] = number, at, float(number)
            begins.append(begins[-1] + count)
            used.append(row)
            is_draft = count <= 1 + num_drafts and data.draw(st.booleans())
            wrong = data.draw(st.integers(0, count - 1)) if is_draft else 0
            ends[row], lens[row] = lens[row] + count, lens[row] + count - wrong
        empty = ROWS - len(used)
        table = PageTable(
            jnp.array([ends[row] for row in used] + [0] * empty, jnp.int32),
            jnp.array([*tables[used], *np.zeros((empty, PAGES_PER_SEQ), np.int32)], jnp.int32),
            jnp.array(begins + begins[-1:] * empty, jnp.int32),
            jnp.array([len(used)], jnp.int32),
        )
        found, kept = shifted(pages, kept, features, positions, table)
        places = [place for place in np.asarray(pages.written(positions, table)) if place % pages.num_pages]
        assert len(set(places)) == len(places) > 0 or not used
        assert {token: float(found[token, 0]) for token in expected} == expected


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    """Sizes, layers, drafts without tokens, forms that are none, and keys that ask for more."""
    name = "authors"
    for number, (overrides, why) in enumerate(
        (
            ({"vocab_size": 160}, "for a vocabulary of 160 tokens, and the model has a vocabulary of 144"),
            ({"hidden_size": 64}, "for hidden states of 64 numbers, and the model has hidden states of 48"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, "inputs of the layers 1, 4, 7, .* the model has 7"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, "have to be different"),
            ({"num_hidden_layers": 2}, "a draft head of 2 layers is not supported"),
            ({"architectures": ["LlamaForCausalLM"]}, "are of no draft head of EAGLE-3"),
            ({"norm_before_fc": True}, "norm_before_fc is not supported"),
            ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
            ({"model_type": "deepseek_v3"}, "model_type"),
            ({"target_hidden_size": 48, "hidden_size": 32}, "has no embed_tokens"),
            ({"draft_vocab_size": 200}, "draft_vocab_size 200 is more than vocab_size 144"),
        )
    ):
        with pytest.raises(ConfigurationError, match=why):
            read(tmp_path / str(number), name, **overrides)


def test_drafts_that_are_no_tokens_of_the_model_are_refused(tmp_path):
    """Before they are fed to it; and a head that does not say which tokens it drafts."""
    model = read_model_config(build_target(tmp_path / "model", "authors"))
    directory, tensors = build_head(tmp_path / "head", "authors"), head_tensors("authors")
    form, mesh = WeightFormat(np.dtype(np.float32)), DeviceMesh((jax.local_devices()[0],))
    for place, value, why in (
        (59, 144 - 59, "tokens from .* to 144"),
        (1, int(tensors["d2t"][0]) - 1, "a token twice"),
    ):
        places = tensors["d2t"].copy()
        places[place] = value
        write(directory / "model.safetensors", {**tensors, "d2t": places})
        head = split(read_head(directory, model, "head"), 1)
        with pytest.raises(ConfigurationError, match=why):
            load_decoder(open_checkpoint(directory), head, form, mesh=mesh, progress=lambda *_: None)
    write(directory / "model.safetensors", {name: each for name, each in tensors.items() if name != "d2t"})
    with pytest.raises(ConfigurationError, match="has no d2t that says which"):
        read_head(directory, model, "head")


def test_a_model_is_no_head_and_a_head_no_model(tmp_path):
    """Said before anything is loaded; and a model whose layers all have windows has no pages for a head."""
    model, head = build_target(tmp_path / "model", "authors"), build_head(tmp_path / "head", "authors")
    for named, why in ((model, "of no draft head"), ("not/here/at_all", "is not a directory")):
        with pytest.raises(ConfigurationError, match=f"^speculative_config: model: .*{why}"):
            with_draft_directory(EngineConfig(model=str(model), speculative_config=config_of(named)))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLMEagle3"):
        read_model_config(head)
    windows = build_checkpoint(tmp_path / "windows", "mistral", sliding_window=8, num_hidden_layers=7)
    with pytest.raises(ConfigurationError, match="all layers of this model have windows"):
        served_model(EngineConfig(model=str(windows), speculative_config=config_of(head)))
