"""Assistants of Gemma 4: their arithmetic against torch, what the model keeps for them, and what does not fit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_files import AdapterKind, write_adapter
from assistant_checkpoints import ASSISTANTS, CONTEXT, TEXT, VARIANT, assistant_tensors, build_assistant, build_assisted
from checkpoints import build_checkpoint
from head_checkpoints import build_head, write
from loading import FLOAT32, load
from msgspec import structs
from plain_assistant import chained
from test_head_engine import requests
from test_live_weights import wake
from test_speculative_engine import answers, build_engine, build_sequences

from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.hub.obtain import with_draft_directory
from engine.models.heads.assistant_config import read_assistant
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.store import load_decoder
from engine.served_model import served_model

GOLDENS = Path(__file__).parent / "goldens" / "heads"


def config_of(assistant, **keys):
    """The setting, as JSON."""
    return json.dumps({"method": "mtp", "model": str(assistant), "num_speculative_tokens": 3, **keys})


def loaded(directory, model, name):
    """An assistant for a model."""
    partition, mesh = split(read_assistant(directory, model, name), 1), DeviceMesh((jax.local_devices()[0],))
    return load_decoder(open_checkpoint(directory), partition, FLOAT32, mesh=mesh, progress=lambda *_: None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "assistant" else pytest.mark.thorough) for name in ASSISTANTS]
)
def test_an_assistant_drafts_what_torch_does(name, tmp_path):
    """Three drafts behind each beginning of a text, and the logits of the likeliest tokens behind some."""
    decoder = load(build_assisted(tmp_path / "model", name))
    assistant = loaded(build_assistant(tmp_path / "assistant", name), decoder.partition.model, name)
    compared = 0

    for case in json.loads((GOLDENS / f"{name.replace(' ', '_')}.json").read_text())["cases"]:
        begin, text = len(case["prompt"]), case["prompt"] + case["tokens"]
        logits = np.asarray(chained(decoder, assistant, jnp.array(text + [0] * (CONTEXT - len(text)), jnp.int32)))

        drafts = logits.argmax(axis=-1)[:, begin : len(text)].T.tolist()
        for ours, theirs in zip(drafts, case["drafts"], strict=True):
            assert ours[: len(theirs)] == theirs
            compared += len(theirs)
        for some in case["logits"]:
            found = np.take_along_axis(logits[:, some["length"] - 1], np.array(some["token_ids"]), axis=1)
            # Each draft is made of what the assistant made for the one before, and so is its rounding.
            np.testing.assert_allclose(found, some["logits"], atol=1e-4, rtol=5e-5)
    assert compared > 200


@pytest.mark.thorough
def test_requests_are_given_the_same_as_without_drafts(tmp_path):
    """Drawn and greedy, several at once, preempted, and from pages of others; some drafts are right."""
    name = "assistant in clusters"
    model, assistant = build_assisted(tmp_path / "model", name), build_assistant(tmp_path / "assistant", name)
    engine = build_engine(model, config_of(assistant), num_pages=14, max_num_seqs=6)
    vocabulary = engine.limits.vocab_size

    def sequences(drafts):
        found = build_sequences(0, 8, vocabulary) + requests(1, 6, vocabulary, temperature=100.0)
        for sequence in found:
            sequence.params = structs.replace(sequence.params, num_speculative_tokens=drafts)
        return found

    expected = answers(engine, sequences(0))
    assert engine.stats().num_draft_tokens == 0

    assert answers(engine, sequences(None)) == expected

    stats = engine.stats()
    assert stats.num_draft_tokens > 100 and stats.num_accepted_tokens > 10
    assert stats.preemptions and stats.prefix_cache_hits and not stats.compilations_after_ready


@pytest.mark.thorough
def test_drafts_are_right_as_often_beside_adapters_and_after_sleeps(tmp_path):
    """What requests are given is the same as without drafts, and after a wake the same again."""
    name, adapter = "assistant", AdapterKind(r"self_attn\.q_proj|mlp\.up_proj", 4, seed=1)
    model, assistant = build_assisted(tmp_path / "model", name), build_assistant(tmp_path / "assistant", name)
    engine = build_engine(model, config_of(assistant), num_pages=40, enable_lora=True, max_loras=2, max_lora_rank=8)
    found = engine.read_adapter(str(write_adapter(tmp_path / "adapter", VARIANT, adapter)))
    engine.add_adapter(found)

    def counted(drafts):
        """The answers, and how many drafts were right."""
        sequences, before = requests(1, 8, engine.limits.vocab_size, temperature=100.0), engine.stats()
        for number, sequence in enumerate(sequences):
            sequence.params = structs.replace(sequence.params, num_speculative_tokens=drafts)
            sequence.adapter_id = found.uid if number % 2 else 0
            sequence.salt = bytes([number % 2])
        return answers(engine, sequences), engine.stats().num_accepted_tokens - before.num_accepted_tokens

    expected, _ = counted(0)
    drafted = counted(None)
    assert drafted[0] == expected and drafted[1] > 20
    for level in (1, 2):
        engine.sleep(level)
        wake(engine)

        again = counted(None)

        assert again[0] == expected and again[1] > 20


def test_pages_have_hidden_states_of_the_model_and_nothing_of_the_assistant(tmp_path):
    """Windows are two tokens longer: those that the assistant sees end before the last token, and are one more."""
    model, assistant = build_assisted(tmp_path / "model", "assistant"), build_assistant(tmp_path / "head", "assistant")
    plain = served_model(EngineConfig(model=str(model)))
    ours = served_model(EngineConfig(model=str(model), speculative_config=config_of(assistant)))

    assert (
        ours.partition == plain.partition
        and ours.footprint.resident_bytes == plain.footprint.resident_bytes + ours.draft.footprint.weight_bytes
    )
    page, tail = ours.footprint.one_page, ours.footprint.one_page.of_draft.tail
    assert (tail.rows, tail.size) == (4, plain.model.hidden_size) and page.of_draft.num_layers == 0
    assert page.bytes_per_page == plain.footprint.one_page.bytes_per_page + tail.num_bytes
    assert (plain.footprint.one_page.windows, page.windows) == ((None, 8), (None, 10))
    assert ours.draft.footprint.weight_bytes >= sum(tensor.nbytes for tensor in assistant_tensors("assistant").values())


@pytest.mark.parametrize(
    ("overrides", "text", "why"),
    [
        ({"backbone_hidden_size": 64}, {}, "for hidden states of 64 numbers, and the model has hidden states of 48"),
        ({}, {"vocab_size": 160}, "for a vocabulary of 160 tokens, and the model has a vocabulary of 144"),
        ({}, {"head_dim": 32}, "reads keys of heads of 32 numbers, and layer 2 of the model has heads of 16"),
        ({}, {"global_head_dim": 16}, "reads keys of heads of 16 numbers, and layer 3 of the model has heads of 32"),
        ({}, {"num_key_value_heads": 4}, "reads keys of 4 kv heads, and layer 2 of the model has 2 kv heads"),
        ({}, {"sliding_window": 9}, "reads keys of windows of 9 tokens, and layer 2 of the model has windows of 8"),
        (
            {},
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            "num_attention_heads 3 is no multiple of the model's 2",
        ),
        ({}, {"layer_types": ["chunked_attention"] * 3}, "layer_types 'chunked_attention' is not supported"),
        ({}, {"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ({}, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8 is not supported"),
        ({}, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({}, {"model_type": "gemma4_unified_text"}, "model_type 'gemma4_unified_text' is not supported"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 100},
            {},
            "num_centroids 100 does not divide vocab_size 144",
        ),
        (
            {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 13},
            {},
            "centroid_intermediate_top_k 13 is more than num_centroids 12",
        ),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config is not supported of an assistant"),
        (
            {"architectures": ["Gemma4UnifiedAssistantForCausalLM"]},
            {},
            "the assistant of Gemma 4 Unified, is not supported",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            {},
            "are of no assistant of Gemma 4, .* model names such alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, overrides, text, why):
    """Sizes, layers, forms, and keys that ask for more."""
    model = read_model_config(build_assisted(tmp_path / "model", "assistant"))
    directory = build_assistant(tmp_path / "head", "assistant", text_config=TEXT | text, **overrides)

    with pytest.raises(ConfigurationError, match=why):
        read_assistant(directory, model, "head")


def test_an_assistant_is_for_gemma_4_and_no_model_of_its_own(tmp_path):
    """Said before anything is loaded, as it is of a head that is no assistant."""
    assistant, head = build_assistant(tmp_path / "assistant", "assistant"), build_head(tmp_path / "head", "authors")
    llama = str(build_checkpoint(tmp_path / "llama", "llama2"))
    with pytest.raises(ConfigurationError, match="the model is no Gemma 4: choose another method"):
        served_model(EngineConfig(model=llama, speculative_config=config_of(assistant)))
    with pytest.raises(ConfigurationError, match="leave it out to draft with a layer of the model's own checkpoint"):
        with_draft_directory(EngineConfig(model=llama, speculative_config=config_of(head)))
    with pytest.raises(ConfigurationError, match="model_type 'gemma4_assistant' is not supported"):
        read_model_config(assistant)
    with pytest.raises(ConfigurationError, match="this model has none: choose another method"):
        speculation = '{"method": "mtp", "num_speculative_tokens": 1}'
        gemma = str(build_assisted(tmp_path / "gemma", "assistant"))
        served_model(EngineConfig(model=gemma, speculative_config=speculation))


@pytest.mark.parametrize(
    ("ordering", "why"), [(range(1, 145), "has tokens from 1 to 144"), ([0, *range(143)], "has a token twice")]
)
def test_an_order_that_is_none_is_refused(tmp_path, ordering, why):
    """Before its tokens are fed to the model."""
    name = "assistant in clusters"
    model = read_model_config(build_assisted(tmp_path / "model", name))
    directory = build_assistant(tmp_path / "assistant", name)
    tensors = assistant_tensors(name) | {"masked_embedding.token_ordering": np.array([*ordering])}
    write(directory / "model.safetensors", tensors)

    with pytest.raises(ConfigurationError, match=why):
        loaded(directory, model, name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_of_logits_may_be_stored_by_itself(tmp_path, tied):
    """Where it is not the embedding, that is left; where it is, it has to be the same."""
    name = "assistant in clusters"
    model = read_model_config(build_assisted(tmp_path / "model", name))
    directory = build_assistant(tmp_path / "assistant", name, tie_word_embeddings=tied)
    tensors = assistant_tensors(name)
    table, order = tensors["model.embed_tokens.weight"], tensors["masked_embedding.token_ordering"]
    own = table if tied else -table
    write(directory / "model.safetensors", tensors | {"lm_head.weight": own})

    read = np.asarray(jax.tree.leaves(loaded(directory, model, name).lm_head.get_value())[0])

    np.testing.assert_array_equal(read[:, : own.shape[1]], own[order])
