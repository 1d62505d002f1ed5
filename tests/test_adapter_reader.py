"""Adapters are read as PEFT writes them, or refused by the name of what is not served."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import regex
from adapter_files import ADAPTERS, AdapterKind, adapter_tensors, fused_tensors, write_adapter
from checkpoints import VARIANTS, build_checkpoint
from loading import load
from safetensors.numpy import save_file

from engine.adapters import patterns
from engine.adapters.adapter import AdapterError
from engine.adapters.reader import AdapterReader
from engine.adapters.slot_arrays import AdapterSizes, slot_arrays
from engine.devices.mesh import one_device
from engine.errors import ConfigurationError
from engine.models.weights.weight_format import Layout

KIND = ADAPTERS["llama2"]["everything"]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
YEARS = r"(?:\w|\W|.)+[!?]"
"""An expression that tries 2 to 3 ways a letter."""
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    """Slots of rank 16 beside the kernels of a model."""
    decoder = load(build_checkpoint(tmp_path_factory.mktemp("model"), "llama2"))
    return slot_arrays(decoder, AdapterSizes(2, 16, np.dtype(np.float32), Layout.MATRIX), one_device())


@pytest.fixture
def read(slots, tmp_path):
    """Writes an adapter with these options and changes of its tensors, and reads it."""

    def read(change=lambda tensors: None, *, kind=KIND, **options):
        kind, tensors = replace(kind, options=kind.options | options), adapter_tensors("llama2", kind)
        change(tensors)
        write_adapter(tmp_path, "llama2", kind, tensors or {"none": np.zeros(1, np.float32)})
        return AdapterReader(slots).read(str(tmp_path))

    return read


def test_an_adapter_has_its_rank_its_bytes_and_an_id_of_its_own(slots, tmp_path):
    """What is read again is another adapter."""
    directory, reader = str(write_adapter(tmp_path, "llama2", ADAPTERS["llama2"]["one layer"])), AdapterReader(slots)

    first, again = reader.read(directory), reader.read(directory)

    assert (first.uid, again.uid) == (1, 2) and first.rank == 1 and first.origin == directory
    assert first.num_bytes == sum(array.nbytes for array in again.arrays) > 0


def test_half_precision_is_read_as_its_numbers(read):
    """Checkpoints are mostly bfloat16."""

    def halve(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(ml_dtypes.bfloat16)

    whole, half = read(), read(halve)

    for one, other in zip(whole.arrays, half.arrays, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias all"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "mlp.experts.gate_up_proj names nothing"),
        ({"target_modules": ["nothing"]}, "down_proj has tensors, and target_modules do not name it"),
        ({"target_modules": None}, "target_modules do not name it"),
        ({"target_modules": r".*\.[qkv]_proj"}, "mlp.down_proj has tensors, and target_modules do not name it"),
        ({"exclude_modules": ["v_proj"]}, "v_proj has tensors, and target_modules do not name it"),
        ({"target_modules": [*PROJECTIONS, "lm_head"]}, "names lm_head, of which"),
        ({"target_modules": [*PROJECTIONS, "embed_tokens"]}, "names model.embed_tokens, of which"),
        ({"target_modules": PROJECTIONS, "layers_to_transform": [0, 2]}, "layers.1.*do not name it"),
        ({"target_modules": "("}, "no pattern"),
        ({"target_modules": 7}, "cannot be read"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": "OLoRA"}, "OLoRA may change the model"),
        ({"init_lora_weights": "one of tomorrow"}, "one of tomorrow may change the model"),
        ({"an_option_of_tomorrow": {"rank": 2}}, "an_option_of_tomorrow"),
        ({"rank_pattern": {"(": 8}}, "no pattern"),
        ({"rank_pattern": {"(?x)q_proj # not v_proj": 8}}, "no pattern"),
        ({"rank_pattern": {"(?R)?q_proj": 8}}, "no pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "at least 1"),
        ({"lora_alpha": 1e999}, "cannot be read"),
        ({"lora_alpha": 1e40}, "lora_alpha is too large"),
        ({"r": "eight"}, "cannot be read"),
        ({"r": 17}, "raise max_lora_rank"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(read, option, words):
    """Nothing of an adapter is left out silently."""
    with pytest.raises(AdapterError, match=words):
        read(**option)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": PROJECTIONS},
        {"target_modules": [*PROJECTIONS, "conv1d"]},
        {"target_modules": ["self_attn.q_proj", *PROJECTIONS[1:]], "exclude_modules": ".*norm"},
        {"target_modules": "all-linear"},
        {"target_modules": PROJECTIONS, "layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
    ],
)
def test_modules_are_named_in_all_ways_of_peft(read, options):
    """By ends, by an expression, by layers or all at once; what the model does not have may be named."""
    assert read(**options).rank == KIND.rank


@pytest.mark.parametrize("value", [True, False, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_how_factors_began_does_not_matter_where_the_model_is_unchanged(read, value):
    """What they were trained to is in the file."""
    assert read(init_lora_weights=value).rank == KIND.rank


@pytest.mark.parametrize("option", [{"target_modules": YEARS}, {"rank_pattern": {YEARS: 8}}])
def test_a_pattern_that_would_take_years_is_refused(read, monkeypatch, option):
    """Whoever wrote it is not to hold up a daemon that serves others."""
    monkeypatch.setattr(patterns, "SECONDS", 0.01)

    with pytest.raises(AdapterError, match="takes too long"):
        read(**option)


def test_a_pattern_for_each_module_is_compiled_once(read, monkeypatch):
    """As EVA writes them: of a large model there are hundreds, and each may be matched with all modules."""
    compiled = Counter()

    def compile_and_count(pattern, **options):
        compiled[pattern] += 1
        return regex.compile(pattern, **options)

    patterns._compiled.cache_clear()
    monkeypatch.setattr(patterns, "regex", SimpleNamespace(compile=compile_and_count, error=regex.error))
    ranks = {f"model.layers.{layer}.self_attn.{name}_proj": 16 for layer in range(200) for name in "qkvo"}

    read(rank_pattern=ranks, target_modules=PROJECTIONS)

    assert {compiled[rf"(.*\.)?({name})$"] for name in ranks} == {1}


def test_a_layer_that_is_left_out_has_no_tensors(read):
    """The layers of an adapter are those of its configuration."""

    def without_first(tensors):
        for name in [name for name in tensors if ".layers.0." in name]:
            del tensors[name]

    named = {"target_modules": PROJECTIONS}
    assert read(without_first, layers_to_transform=[1, 2], **named).rank == KIND.rank
    with pytest.raises(AdapterError, match=r"names model.layers.0.self_attn.[a-z]_proj, of which"):
        read(without_first, **named)


@pytest.mark.parametrize("outer", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    "options",
    [
        {"exclude_modules": [f"{{outer}}layers.0.self_attn.{name}_proj" for name in "qkvo"]},
        {"exclude_modules": r"{outer}layers\.0\.self_attn\..*"},
        {"target_modules": r"(?!{outer}layers\.0\.self_attn).*\.[a-z]+_proj"},
    ],
)
def test_whole_names_are_those_of_the_model_that_it_was_trained_for(read, outer, options):
    """Alone or beside a vision tower: what is left out by the name there need not be left out by another name."""

    def without_some(tensors):
        for name in list(tensors):
            tensor = tensors.pop(name)
            if ".layers.0.self_attn." not in name:
                tensors[name.replace("model.layers.", f"{outer}layers.")] = tensor

    named = {"target_modules": PROJECTIONS} | {
        option: [name.replace("{outer}", outer) for name in value]
        if isinstance(value, list)
        else value.replace("{outer}", outer)
        for option, value in options.items()
    }
    assert read(without_some, **named).rank == KIND.rank


def test_factors_of_a_vision_tower_are_passed_over(tmp_path):
    """PEFT adapts its modules of the same ends, too; nothing that is computed for text depends on them."""
    decoder = load(build_checkpoint(tmp_path / "model", "gemma3_vision"))
    sizes = AdapterSizes(2, 16, np.dtype(np.float32), Layout.MATRIX)
    reader, kind = AdapterReader(slot_arrays(decoder, sizes, one_device())), AdapterKind(r"language_model.*q_proj", 8)
    text = adapter_tensors("gemma3_vision", kind)
    alone = reader.read(str(write_adapter(tmp_path / "alone", "gemma3_vision", kind, text)))
    q = "base_model.model.{}vision_model.encoder.layers.0.self_attn.q_proj.lora_{}.weight"

    for outer in ("vision_tower.", "model.vision_tower."):
        tower = {q.format(outer, factor): np.full((3, 5), np.nan, np.float32) for factor in "AB"}
        beside = reader.read(str(write_adapter(tmp_path / outer, "gemma3_vision", kind, text | tower)))

        for one, other in zip(alone.arrays, beside.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(AdapterError, match="no factors of what is served here"):
        reader.read(str(write_adapter(tmp_path / "tower", "gemma3_vision", kind, tower)))


def test_a_square_tensor_of_all_experts_is_read_as_its_neighbours_are(tmp_path):
    """An older PEFT takes its outputs for inputs, which the shapes of square factors do not tell."""
    square = {"moe_intermediate_size": VARIANTS["qwen3_moe"].config["hidden_size"] // 2}
    decoder = load(build_checkpoint(tmp_path / "model", "qwen3_moe", **square))
    sizes = AdapterSizes(2, 8, np.dtype(np.float32), Layout.MATRIX, ("experts",))
    reader = AdapterReader(slot_arrays(decoder, sizes, one_device()))
    kind = AdapterKind("", 8, 8.0, experts="mlp.experts", options={"target_modules": []})
    usual = fused_tensors("qwen3_moe", kind, **square)
    swapped = {}
    for name, a in usual.items():
        if ".lora_A." in name:
            high = name.replace(".lora_A.", ".lora_B.")
            b, experts = usual[high], len(a) // 8
            swapped[name] = b.reshape(len(b), 8, experts).transpose(2, 1, 0).reshape(-1, len(b))
            swapped[high] = a.reshape(experts, 8, -1).transpose(2, 1, 0).reshape(a.shape[1], -1)

    read = [
        reader.read(str(write_adapter(tmp_path / name, "qwen3_moe", kind, tensors, **square)))
        for name, tensors in (("usual", usual), ("swapped", swapped))
    ]

    assert any(usual[name].shape == swapped[name].shape for name in usual)
    for one, other in zip(*(adapter.arrays for adapter in read), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_whole_name_is_of_no_layer(read):
    """PEFT adapts the module of a whole name, as the head's is, whatever the layers."""
    kind = AdapterKind(r"layers\.1\.self_attn\.q_proj|lm_head|layers\.2\.self_attn\.v_proj", 8)
    named = ["q_proj", "lm_head", "model.layers.2.self_attn.v_proj"]

    assert read(kind=kind, target_modules=named, layers_to_transform=1).rank == 8


def test_a_table_beside_its_adapter_is_the_models_or_refused(read):
    """PEFT saves it, as somebody may have added tokens."""
    kind = AdapterKind("embed_tokens|lm_head", 8)
    copies = [f"base_model.model.{name}.base_layer.weight" for name in ("model.embed_tokens", "lm_head")]

    read(lambda tensors: tensors.update({name: np.zeros((144, 48), np.float32) for name in copies}), kind=kind)

    with pytest.raises(AdapterError, match="other tokens"):
        read(lambda tensors: tensors.update({copies[0]: np.zeros((145, 48), np.float32)}), kind=kind)
    with pytest.raises(AdapterError, match="not how PEFT adapts"):
        read(lambda tensors: tensors.update(as_linear(tensors)), kind=kind)
    with pytest.raises(AdapterError, match="no factor"):
        read(lambda tensors: tensors.update({A.replace("lora_A", "base_layer"): np.zeros((48, 48), np.float32)}))


def test_the_adapter_of_a_tied_head_is_in_the_file(tmp_path):
    """PEFT saves it beside the embedding's, whose it is, and its configuration does not name it."""
    decoder = load(build_checkpoint(tmp_path / "model", "gemma2"))
    reader = AdapterReader(slot_arrays(decoder, AdapterSizes(2, 16, np.dtype(np.float32), Layout.MATRIX), one_device()))
    options = {"ensure_weight_tying": True, "target_modules": ["embed_tokens", "model.embed_tokens"]}
    both, one = (AdapterKind(targets, 8, options=options) for targets in ("embed_tokens|lm_head", "embed_tokens"))

    assert reader.read(str(write_adapter(tmp_path / "both", "gemma2", both))).rank == 8

    with pytest.raises(AdapterError, match=r"names lm_head.weight, of which"):
        reader.read(str(write_adapter(tmp_path / "one", "gemma2", one)))


def test_tables_have_other_names_in_gpt_neox(tmp_path):
    """Its head two of them, by the version of transformers; and none of them is meant by "all-linear"."""
    linear, options = r"query_key_value|attention\.dense|dense_h_to_4h|dense_4h_to_h", {"target_modules": "all-linear"}
    decoder = load(build_checkpoint(tmp_path / "model", "gpt_neox"))
    slots = slot_arrays(decoder, AdapterSizes(1, 8, np.dtype(np.float32), Layout.MATRIX), one_device())
    older, newer = (AdapterKind(rf"{linear}|{head}", 8) for head in ("embed_out", "lm_head"))
    tensors = adapter_tensors("gpt_neox", older)
    renamed = {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()

    first, second, every = (
        AdapterReader(slots).read(str(write_adapter(tmp_path / str(number), "gpt_neox", kind, given)))
        for number, (kind, given) in enumerate(
            [(older, tensors), (newer, renamed), (AdapterKind(linear, 8, options=options), None)]
        )
    )

    for one, other in zip(first.arrays, second.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    assert every.rank == 8


def as_linear(tensors):
    """The embedding's factors under the names of a linear module's."""
    names = {
        name: name.replace("lora_embedding_", "lora_") + ".weight" for name in list(tensors) if "embedding_" in name
    }
    return {new: tensors.pop(old) for old, new in names.items()}


def test_slots_have_room_for_the_modules_that_the_operator_names(tmp_path):
    """An adapter of others is refused, as is a name that no module has."""
    decoder = load(build_checkpoint(tmp_path / "model", "llama2"))
    sizes = AdapterSizes(2, 16, np.dtype(np.float32), Layout.MATRIX, ("q_proj", "lm_head"))
    reader = AdapterReader(slot_arrays(decoder, sizes, one_device()))

    assert reader.read(str(write_adapter(tmp_path / "q", "llama2", AdapterKind("q_proj|lm_head", 8)))).rank == 8

    with pytest.raises(AdapterError, match=r"no room for model.layers.0.self_attn.o_proj: name it in lora_target"):
        reader.read(str(write_adapter(tmp_path / "o", "llama2", AdapterKind("o_proj", 8))))
    with pytest.raises(ConfigurationError, match="lora_target_modules: experts is no module"):
        slot_arrays(decoder, replace(sizes, targets=("q_proj", "experts")), one_device())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.clear(), "no factor"),
        (lambda tensors: tensors.pop(B), "lora_B of model.layers.0.self_attn.q_proj is missing"),
        (lambda tensors: tensors.pop(A), "lora_A of model.layers.0.self_attn.q_proj is missing"),
        (lambda tensors: tensors.update({A: np.zeros((16, 47), np.float32)}), r"\[16, 47\] and should be \[16, 48\]"),
        (lambda tensors: tensors.update({A: np.zeros((8, 48), np.float32)}), r"\[8, 48\] and should be \[16, 48\]"),
        (lambda tensors: tensors.update({B: np.full((48, 16), np.nan, np.float32)}), "holds NaN or infinity"),
        (lambda tensors: tensors.update({A: np.full((16, 48), np.inf, np.float32)}), "holds NaN or infinity"),
        (lambda tensors: tensors.update({A: np.zeros((16, 48), np.int8)}), "stored as I8"),
        (lambda tensors: tensors.update({A: np.zeros((16, 48), np.float64)}), "F64"),
        (lambda tensors: tensors.update({A.replace("layers.0", "layers.9"): tensors[A]}), "no module of this model"),
        (lambda tensors: tensors.update({A.replace(".lora_A", ".lora_magnitude_vector"): tensors[A]}), "DoRA"),
        (lambda tensors: tensors.update({B.replace("weight", "bias"): np.zeros(48, np.float32)}), "bias"),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": tensors[A]}),
            "lm_head has tensors, and target_modules do not name it",
        ),
        (
            lambda tensors: tensors.update({"base_model.model.model.norm.lora_A.weight": tensors[A]}),
            "norm is no module of this model",
        ),
        (
            lambda tensors: tensors.update({A.replace("model.layers", "model.language_model.layers"): tensors[A]}),
            "missing|same",
        ),
    ],
)
def test_tensors_without_a_place_or_of_another_shape_are_refused(read, change, words):
    """The file is checked against the model before it is read."""
    with pytest.raises(AdapterError, match=words):
        read(change)


def test_files_that_are_missing_cut_off_or_no_such_files_are_refused(read, slots, tmp_path):
    """Each with a sentence."""
    reader, place = AdapterReader(slots), str(tmp_path)
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        reader.read(place)
    read()
    weights = tmp_path / "adapter_model.safetensors"
    content = weights.read_bytes()
    for cut in (0, 7, 100, len(content) - 1):
        weights.write_bytes(content[:cut])
        with pytest.raises(AdapterError, match=r"adapter_model.safetensors ends (after|before)"):
            reader.read(place)
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(AdapterError, match="is no safetensors file"):
        reader.read(place)
    nested = b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    weights.write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(AdapterError, match="nested too deeply"):
        reader.read(place)
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="pickle"):
        reader.read(place)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match=r"cannot be read|pickle"):
        reader.read(place)


def test_any_header_of_a_file_is_read_or_refused(slots, tmp_path):
    """Offsets and shapes that lie never reach beyond the file."""
    reader = AdapterReader(slots)
    write_adapter(tmp_path, "llama2", KIND)
    for entry in (
        {"dtype": "F32", "shape": [16, 48], "data_offsets": [0, 10**12]},
        {"dtype": "F32", "shape": [16, 48], "data_offsets": [-5, 3]},
        {"dtype": "F32", "shape": [-16, -48], "data_offsets": [0, 3072]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "data_offsets": [0, 8]},
    ):
        header = json.dumps({A: entry, B: {"dtype": "F32", "shape": [48, 16], "data_offsets": [0, 3072]}}).encode()
        path = tmp_path / "adapter_model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2000))
        with pytest.raises(AdapterError):
            reader.read(str(tmp_path))


def test_a_stored_tensor_that_was_saved_by_another_library_is_read(slots, tmp_path):
    """The order of tensors in the file does not matter."""
    write_adapter(tmp_path, "llama2", KIND)
    tensors = adapter_tensors("llama2", KIND)
    before = AdapterReader(slots).read(str(tmp_path))
    save_file(dict(reversed(tensors.items())), tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})

    after = AdapterReader(slots).read(str(tmp_path))

    for one, other in zip(before.arrays, after.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
