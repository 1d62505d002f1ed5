"""What the config.json of a family with experts comes down to, and what is refused or left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SIZES, VARIANTS, build_checkpoint, random_tensors, write_tensors
from loading import load
from moe_checkpoints import LLAMA4
from whole_rows import compute_logprobs

from engine.errors import ConfigurationError
from engine.models.family_names import check_family
from engine.models.layers.experts import ExpertsSpec
from engine.models.model_config import read_config_file, read_model_config

PROMPT = [list(range(5, 35))]


def read(directory: Path, variant: str, **overrides: Any) -> Any:
    """The ModelSpec of a variant's config.json with other values; those that are ... are left out."""
    config = {key: value for key, value in {**VARIANTS[variant].config, **overrides}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config_file(directory / "config.json")


@pytest.mark.parametrize(
    ("variant", "given", "expected"),
    [
        ("qwen3_moe", {"mlp_only_layers": ...}, [0, 1, 2]),
        ("qwen3_moe", {"mlp_only_layers": [1, 9], "decoder_sparse_step": 2}, []),
        ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 3}, [2]),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 4}, [1, 2]),
        ("glm4_moe", {"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ("glm4_moe", {"first_k_dense_replace": ...}, [1, 2, 3]),
        ("glm4_moe", {"first_k_dense_replace": 9}, []),
        ("solar_open", {"first_k_dense_replace": 1, "intermediate_size": ...}, [0, 1, 2]),
        ("afmoe", {"num_dense_layers": 3}, [3]),
        ("mellum", {"mlp_layer_types": None, "mlp_only_layers": [0], "decoder_sparse_step": 2}, [0, 1, 2, 3]),
        ("exaone_moe", {}, [1, 2, 3]),
        ("hy_v3", {}, [1, 2]),
        ("axk1", {"first_k_dense_replace": 0, "moe_layer_freq": 2}, [0, 2]),
        ("mimo_v2", {"mlp_layer_types": ["sparse", "dense"] * 2}, [0, 2]),
        ("cohere2_moe", {"mlp_layer_types": ["sparse", "dense"] * 2}, [0, 2]),
        ("exaone_moe", {"mlp_layer_types": ["dense", "sparse"] * 2, "first_k_dense_replace": 0}, [1, 3]),
        ("llama4_interleaved", {}, [1, 3]),
        ("llama4_interleaved", {"moe_layers": [0, 4]}, [0, 4]),
        ("llama4_interleaved", {"moe_layers": []}, []),
        ("ernie4_5_moe", {}, [1, 2]),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 0}, [1]),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, [1]),
    ],
)
def test_the_layers_with_experts_are_those_of_transformers(
    tmp_path: Path, variant: str, given: dict[str, Any], expected: list[int]
) -> None:
    """Dense layers first, in between and named; and such a model is loaded."""
    model = read(tmp_path, variant, **given)

    blocks = enumerate(model.blocks)
    assert [layer for layer, block in blocks if isinstance(block.feed_forward, ExpertsSpec)] == expected


def test_mellum_has_a_rope_for_each_type_of_layer(tmp_path: Path) -> None:
    """With transformers' thetas where config.json has no rope_parameters; it reads no key of one rope for all."""
    model = read(tmp_path, "mellum", rope_parameters=..., rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2})

    assert [(block.mixer.rope.theta, block.mixer.rope.scaling) for block in model.blocks] == [
        (1e4, "default"),
        (5e5, "default"),
    ] * 2


@pytest.mark.parametrize("architecture", ["ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"])
def test_an_architecture_may_be_written_in_any_case(tmp_path: Path, architecture: str) -> None:
    """As K-EXAONE is published, and as transformers writes it again."""
    assert read(tmp_path, "exaone_moe", architectures=[architecture]).num_layers == 4


def test_so_may_a_model_type(tmp_path: Path) -> None:
    """A.X K1 is published as ``AXK1``: its family is found before the rest is read, too."""
    assert read(tmp_path, "axk1", model_type="AXK1") == read(tmp_path, "axk1")
    (tmp_path / "config.json").write_text('{"model_type": "AXK1"}')
    check_family(tmp_path)


def test_llama_4_sees_chunks_where_it_has_rope(tmp_path: Path) -> None:
    """And all keys where it has none, with queries that grow; layer_types and no_rope_layers may say otherwise."""
    model = read(tmp_path, "llama4")
    other = read(tmp_path, "llama4", layer_types=["full_attention"] * 5, no_rope_layers=[0, 1, 1, 1, 1])

    assert [block.mixer.scores.chunk for block in model.blocks] == [8, 8, None, 8, 8]
    assert [block.mixer.rope.query_scale_beta for block in model.blocks] == [0, 0, 0.4, 0, 0]
    assert [block.mixer.unit_qk_norm for block in model.blocks] == [True, True, False, True, True]
    assert model.attention_extras == "chunks of attention"
    assert [block.mixer.scores.chunk for block in other.blocks] == [None] * 5
    assert [block.mixer.rope.rotary_dim for block in other.blocks] == [0, None, None, None, None]


LLAMA_GUARD_4 = {
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "attention_chunk_size": None,
}


@pytest.mark.parametrize("layer_types", [None, ["chunked_attention"] * 4 + ["full_attention"]])
def test_a_llama_4_without_experts_and_chunks_is_served(tmp_path: Path, layer_types: list[str] | None) -> None:
    """As Llama Guard 4 is published, and as transformers writes it again."""
    build_checkpoint(tmp_path, "llama4", **LLAMA_GUARD_4, layer_types=layer_types)

    model = read_model_config(tmp_path)

    assert [block.mixer.scores.chunk for block in model.blocks] == [None] * 5
    assert not any(isinstance(block.feed_forward, ExpertsSpec) for block in model.blocks)
    assert np.isfinite(compute_logprobs(load(tmp_path), PROMPT)[0]).all()


@pytest.mark.parametrize("key", ["1", "01"])
def test_sizes_of_one_layer_are_found_however_its_number_is_written(tmp_path: Path, key: str) -> None:
    """transformers writes as many digits as the last layer has."""
    model = read(tmp_path, "gemma4", per_layer_config={key: {"head_dim": 20, "num_key_value_heads": 1}})

    assert [block.mixer.head_dim == 20 for block in model.blocks][:3] == [False, True, False]


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 experts a token are more than the 6 experts"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("granite_moe", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("gpt_oss", {"sliding_window": None}, "no sliding window is in use"),
        ("gpt_oss", {"swiglu_limit": 0}, "> 0.*swiglu_limit"),
        ("glm4_moe", {"n_group": 4}, "4 groups do not divide the 6 experts"),
        ("glm4_moe", {"topk_group": 4}, "4 groups a token are more than the 3 groups"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "3 experts a token are more than those of 1 groups"),
        ("glm4_moe", {"n_group": 6, "topk_group": 6}, "groups of 1 experts"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts"),
        ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("exaone_moe", {"swiglu_limits": [7.0] * 4}, "swiglu_limits .* is not supported"),
        ("afmoe", {"n_group": 2}, "n_group 2 is not supported"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("hunyuan_moe", {"moe_topk": [2]}, "moe_topk has 1 entries for 3 layers"),
        ("hunyuan_moe", {"use_cla": True}, "use_cla True is not supported"),
        ("cohere2_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
        ("cohere2_moe", {"prefix_dense_intermediate_size": None}, "need prefix_dense_intermediate_size"),
        ("granite_moe_swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta has 1 entries for 3 layers"),
        ("mimo_v2", {"swa_num_key_value_heads": 1}, "swa_num_key_value_heads 1 is not supported; supported: 2"),
        ("mimo_v2", {"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern .* is not supported"),
        ("mimo_v2", {"v_head_dim": 24}, "values of 24 numbers a head, more than the 16 of keys"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' needs short_mscale and long_mscale"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias True is not supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("gemma4_moe", {"num_experts": None}, "enable_moe_block needs num_experts"),
        ("llama4", {"layer_types": ["sliding_attention"] * 5}, "supported: full_attention, chunked_attention"),
        ("llama4", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 5 layers"),
        ("llama4", {"num_local_experts": 0}, "num_local_experts must be at least 1: there are layers with experts"),
        (
            "llama4",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "a rope that scales queries and keys by 1.13.* not supported with use_qk_norm",
        ),
    ],
)
def test_what_experts_cannot_be_is_refused(tmp_path: Path, variant: str, given: dict[str, Any], message: str) -> None:
    """In words, with the numbers."""
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, variant, **given)


@pytest.mark.parametrize("variant", ["qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide linear_num_value_heads 4"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported"),
    ],
    ids=["heads", "convolution"],
)
def test_what_delta_nets_cannot_be_is_refused(
    tmp_path: Path, variant: str, given: dict[str, Any], message: str
) -> None:
    """Of every family that has them, by the names in config.json."""
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, variant, **given)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("glm4_moe", "model.layers.4.eh_proj.weight"),
        ("exaone_moe", "mtp.layers.0.input_layernorm.weight"),
        ("mellum", "mtp.layers.0.input_layernorm.weight"),
        ("hy_v3", "model.layers.3.input_layernorm.weight"),
        ("mimo_v2", "model.mtp.layers.0.input_layernorm.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, variant: str, name: str) -> None:
    """Published checkpoints have their tensors; those of one layer more are refused by name."""
    build_checkpoint(tmp_path, variant)
    stored = random_tensors(VARIANTS[variant].config, VARIANTS[variant].seed)
    write_tensors(tmp_path, {**stored, name: np.ones((4, 4), np.float32)})

    load(tmp_path)

    write_tensors(tmp_path, {**stored, "model.layers.9.eh_proj.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ConfigurationError, match=r"layers\.9\.eh_proj"):
        load(tmp_path)


def test_of_llama_4_the_text_is_served(tmp_path: Path) -> None:
    """Its tensors are beside a vision tower's, which the daemon names."""
    text = build_checkpoint(tmp_path / "text", "llama4")
    (tmp_path / "all").mkdir()
    config = {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {**SIZES, **LLAMA4, "architectures": None},
    }
    (tmp_path / "all" / "config.json").write_text(json.dumps(config))
    stored = random_tensors(VARIANTS["llama4"].config, VARIANTS["llama4"].seed)
    parts = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    tower = {"vision_model.class_embedding": np.ones(4, np.float32)}
    write_tensors(
        tmp_path / "all", {**parts, **tower, "multi_modal_projector.linear_1.weight": np.ones((4, 4), np.float32)}
    )

    whole = load(tmp_path / "all")

    assert whole.partition.model.unserved == (
        ("vision_model.", "vision tower"),
        ("multi_modal_projector.", "image projector"),
    )
    np.testing.assert_array_equal(compute_logprobs(whole, PROMPT), compute_logprobs(load(text), PROMPT))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "prefix", "gate_up", "down", "is_transposed"),
    [
        ("llama4", "feed_forward.experts", "gate_up_proj", "down_proj", True),
        ("gemma4_moe", "experts", "gate_up_proj", "down_proj", False),
        ("granite_moe", "block_sparse_moe", "input_linear.weight", "output_linear.weight", False),
    ],
)
def test_experts_that_a_quantiser_has_split_are_read(
    tmp_path: Path, variant: str, prefix: str, gate_up: str, down: str, is_transposed: bool
) -> None:
    """llm-compressor writes a tensor for each expert where the model's own checkpoint has one of all."""
    config, seed = VARIANTS[variant].config, VARIANTS[variant].seed
    stacked = build_checkpoint(tmp_path / "stacked", variant)
    apart = build_checkpoint(tmp_path / "apart", variant)
    split = {}
    for name, tensor in random_tensors(config, seed).items():
        layer, found, part = name.partition(f".{prefix}.")
        if not found or part not in (gate_up, down):
            split[name] = tensor
            continue
        each = f"{layer}.{prefix}." + ("" if prefix.endswith("experts") else "experts.")
        for expert, kernel in enumerate(tensor.swapaxes(1, 2) if is_transposed else tensor):
            names = ("gate_proj", "up_proj") if part == gate_up else ("down_proj",)
            for half, projection in zip(np.split(kernel, len(names)), names, strict=True):
                split[f"{each}{expert}.{projection}.weight"] = np.ascontiguousarray(half)
    write_tensors(apart, split)

    assert not any(name.endswith(down) and prefix in name for name in split)
    np.testing.assert_array_equal(compute_logprobs(load(apart), PROMPT), compute_logprobs(load(stacked), PROMPT))
