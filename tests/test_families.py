"""What each family's config.json comes down to, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, LLAMA3_ROPE, MISTRAL, QWEN2, QWEN3, SIZES, VARIANTS, build_checkpoint
from transformers import CONFIG_MAPPING

from caching.attention.spec import AttentionSpec
from engine.errors import ConfigurationError
from engine.models.family import Family
from engine.models.family_names import FAMILIES, check_family, named_families
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec, self_attention
from engine.models.model_config import families_in, read_config_file, read_model_config
from engine.models.rope import inverse_frequencies
from engine.models.rope_spec import RopeSpec
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.weights.sources.opening import check_weights
from engine.request_limits import MOST_EOS_TOKEN_IDS
from engine.sampling.logit_bias import bias_of
from engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from engine.scheduling.sequence import Sequence

DECODERS = {name: family for name, family in families_in(FAMILIES).items() if isinstance(family, Family)}
INTERNLM3 = {**LLAMA, "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "head_dim": 12}
CONFIGS = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "internlm3": INTERNLM3}


def build_model(directory: Path, family: str = "llama", *, without: tuple[str, ...] = (), **overrides: Any) -> Path:
    """A directory with a config.json and something that looks like weights."""
    config = {key: value for key, value in {**CONFIGS[family], **overrides}.items() if key not in without}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    return directory


def build_wrapped(directory: Path, outer: dict[str, Any], inner: dict[str, Any]) -> Path:
    """A directory with the config.json of a model around a text model."""
    config = VARIANTS["gemma3_vision"].config
    text = {key: value for key, value in config["text_config"].items() if key not in ("eos_token_id", "torch_dtype")}
    (directory / "config.json").write_text(json.dumps({**config, **outer, "text_config": {**text, **inner}}))
    return directory


def build_spec(
    *,
    num_kv_heads: int = 2,
    head_dim: int = 12,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope: RopeSpec | None = None,
    windows: tuple[int | None, ...] = (None,) * 3,
    **overrides: Any,
) -> ModelSpec:
    """What the sizes of the tiny checkpoints come down to."""
    sizes = {"vocab_size": 144, "hidden_size": 48, "max_position": 64, "rms_norm_eps": 1e-5, "eos_token_ids": (2,)}

    def block(window: int | None) -> BlockSpec:
        scores = AttentionSpec(head_dim**-0.5, window)
        mixer = SelfAttentionSpec(
            4, num_kv_heads, head_dim, scores, qkv_bias, output_bias, qk_norm, rope=rope or RopeSpec()
        )
        return BlockSpec(mixer, GatedSpec(80, mlp_bias))

    return ModelSpec(**{**sizes, "blocks": tuple(map(block, windows)), **overrides})


FAMILY_ROWS = [
    ("llama", {}, {}),
    ("llama", {"head_dim": 32}, {"head_dim": 32}),
    ("llama", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
    ("llama", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, {}),
    ("mistral", {}, {"windows": (4096,) * 3}),
    ("mistral", {"sliding_window": 8}, {"windows": (8,) * 3}),
    ("mistral", {"sliding_window": None}, {}),
    ("mistral", {"sliding_window": None, "attention_bias": True}, {}),
    ("qwen2", {}, {"qkv_bias": True}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, {"qkv_bias": True}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"qkv_bias": True, "windows": (None, None, 8)},
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, {"qkv_bias": True}),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"qkv_bias": True, "windows": (8, None, 8)},
    ),
    ("internlm3", {}, {}),
    ("internlm3", {"qkv_bias": True, "bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    (
        "internlm3",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    ("internlm3", {"qkv_bias": True}, {"qkv_bias": True}),
    ("internlm3", {"bias": True}, {"output_bias": True, "mlp_bias": True}),
    ("qwen3", {}, {"qk_norm": True, "head_dim": 16}),
    (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {
            "qk_norm": True,
            "head_dim": 16,
            "qkv_bias": True,
            "output_bias": True,
            "windows": (None, 8, 8),
        },
    ),
]


@pytest.mark.parametrize(("family", "given", "expected"), FAMILY_ROWS)
def test_each_family_reads_its_keys(
    tmp_path: Path, family: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A family's config.json comes down to the decoder that transformers would build from it."""
    directory = build_model(tmp_path, family, **given)

    config = read_model_config(directory)

    assert config == build_spec(**expected)


@pytest.mark.parametrize(
    ("family", "missing", "expected"),
    [
        ("llama", "num_key_value_heads", {"num_kv_heads": 4}),
        ("llama", "rms_norm_eps", {"rms_norm_eps": 1e-6}),
        ("llama", "eos_token_id", {"eos_token_ids": (2,)}),
        ("llama", "hidden_act", {}),
        ("llama", "architectures", {}),
        ("qwen2", "eos_token_id", {"qkv_bias": True, "eos_token_ids": ()}),
        ("qwen3", "head_dim", {"qk_norm": True, "head_dim": 128}),
    ],
)
def test_a_missing_key_means_what_transformers_assumes(
    tmp_path: Path, family: str, missing: str, expected: dict[str, Any]
) -> None:
    """A key that config.json leaves out has the default of its family in transformers."""
    directory = build_model(tmp_path, family, without=(missing,))

    config = read_model_config(directory)

    assert config == build_spec(**expected)


@pytest.mark.parametrize("family", sorted(DECODERS.keys() & CONFIG_MAPPING.keys()))
def test_the_end_that_no_config_names_is_that_of_transformers(family: str) -> None:
    """Each family has a default of its own there, or none."""
    assert DECODERS[family].defaults.get("eos_token_id") == getattr(CONFIG_MAPPING[family](), "eos_token_id", None)


def test_mistral_without_kv_heads_has_eight(tmp_path: Path) -> None:
    """Mistral's default number of kv heads is 8, not the number of heads."""
    directory = build_model(tmp_path, "mistral", without=("num_key_value_heads",), num_attention_heads=16, head_dim=4)

    config = read_model_config(directory)

    assert (config.blocks[0].mixer.num_heads, config.blocks[0].mixer.num_kv_heads) == (16, 8)


LLAMA3 = RopeSpec(
    theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RopeSpec()),
        ({"rope_theta": 1e6}, RopeSpec(theta=1e6)),
        ({"rope_theta": 1000000, "rope_scaling": None}, RopeSpec(theta=1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(theta=1e6)),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e5}, RopeSpec(theta=1e6)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}, LLAMA3),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}}, LLAMA3),
    ],
)
def test_rope_is_read_in_both_spellings(tmp_path: Path, given: dict[str, Any], expected: RopeSpec) -> None:
    """rope_theta with rope_scaling (transformers 4) and rope_parameters (5) say the same thing."""
    directory = build_model(tmp_path, **given)

    config = read_model_config(directory)

    assert config.blocks[0].mixer.rope == expected


@pytest.mark.parametrize("spelling", [{"type": "linear"}, {"rope_type": "linear"}])
def test_linear_scaling_stretches_the_context(tmp_path: Path, spelling: dict[str, str]) -> None:
    """Under linear scaling max_position_embeddings is the length before it: the context is factor times that."""
    directory = build_model(tmp_path, rope_scaling={**spelling, "factor": 2.5})

    config = read_model_config(directory)

    assert config.blocks[0].mixer.rope == RopeSpec(scaling="linear", factor=2.5)
    assert config.max_position == 160


def test_llama3_scaling_may_have_no_band_between_its_two(tmp_path: Path) -> None:
    """In Llama 4 Scout's one wavelength parts what is scaled from what is not."""
    scout = {**LLAMA3_ROPE, "low_freq_factor": 2.0, "high_freq_factor": 2.0}
    directory = build_model(tmp_path, rope_scaling={"rope_type": "llama3", **scout}, rope_theta=100.0)

    rope = read_model_config(directory).blocks[0].mixer.rope

    plain = inverse_frequencies(16, RopeSpec(theta=100.0), 64)
    is_long = 2 * np.pi / plain > 32 / 2
    np.testing.assert_allclose(inverse_frequencies(16, rope, 64), np.where(is_long, plain / 8, plain), rtol=1e-6)
    assert 0 < is_long.sum() < len(plain)


def test_yarn_may_take_back_what_it_makes_of_attention(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B's factor, which vLLM multiplies by."""
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attn_factor": 0.8782488562869419,
    }

    rope = read_model_config(build_model(tmp_path, "qwen3", rope_scaling=yarn)).blocks[0].mixer.rope

    assert rope.attention_factor == pytest.approx(1.0)


def test_a_checkpoint_of_modelopt_is_refused_before_its_weights_are_there(tmp_path: Path) -> None:
    """It may say so in a file of its own alone."""
    (build_model(tmp_path) / "hf_quant_config.json").write_text("{}")

    with pytest.raises(ConfigurationError, match=r"hf_quant_config\.json .* give the model that it was made from"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("beside", "inside", "expected"), [(None, 32, 32), (16, 32, 16), (None, None, 64)])
def test_llama3_finds_its_original_context(
    tmp_path: Path, beside: int | None, inside: int | None, expected: int
) -> None:
    """original_max_position_embeddings counts beside the rope, then inside it, then the context itself."""
    rope = {"rope_type": "llama3", **LLAMA3_ROPE, "original_max_position_embeddings": inside}
    directory = build_model(tmp_path, rope_scaling=rope, original_max_position_embeddings=beside)

    config = read_model_config(directory)

    assert config.blocks[0].mixer.rope.original_max_position == expected


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_checkpoints_dtype_is_read_in_both_spellings(tmp_path: Path, key: str) -> None:
    """torch_dtype (transformers 4) and dtype (5) name the checkpoint's dtype."""
    directory = build_model(tmp_path, **{key: "bfloat16"})

    config = read_model_config(directory)

    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("generation", "eos_token_id", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 2, (5, 6, 2)),
        ({"eos_token_id": [5, 6, 5]}, [2, 6], (5, 6, 2)),
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": 0}, 2, (0, 2)),
        ({"temperature": 0.6}, [2, 3], (2, 3)),
        (None, [2, 3], (2, 3)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(
    tmp_path: Path, generation: dict[str, Any] | None, eos_token_id: Any, expected: tuple[int, ...]
) -> None:
    """generation_config.json's and config.json's, of which each has one or several, or none."""
    directory = build_model(tmp_path, eos_token_id=eos_token_id)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))

    config = read_model_config(directory)

    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, (1, 106)),
        ({"eos_token_id": 106}, {"eos_token_id": None}, (106,)),
        ({"eos_token_id": None}, {"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": [106]}, {}, (106,)),
        ({}, {"eos_token_id": None}, ()),
        ({}, {}, (1,)),
    ],
)
def test_eos_ids_may_be_beside_a_text_model_and_within(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """All of them end an output, as Gemma 3's end of a turn, which only the outer list has."""
    assert read_model_config(build_wrapped(tmp_path, outer, inner)).eos_token_ids == expected


def test_what_is_beside_a_text_model_holds_where_it_says_nothing_itself(tmp_path: Path) -> None:
    """With a null too; what it does say goes first."""
    quantised = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}
    nulls = {"quantization_config": None, "compression_config": None, "dtype": None}

    said = read_model_config(build_wrapped(tmp_path, {**quantised, "torch_dtype": None}, nulls))
    unsaid = read_model_config(build_wrapped(tmp_path, {"dtype": "bfloat16"}, {"dtype": "float16"}))

    assert said.published is not None and said.dtype == "bfloat16"
    assert unsaid.published is None and unsaid.dtype == "float16"


def test_a_text_model_may_be_described_beside_its_tower_where_it_is_published_so(tmp_path: Path) -> None:
    """Qwen2.5-VL is; of others a text_config is asked for."""
    flat = VARIANTS["qwen2_5_vl"].config
    text = {key: value for key, value in flat.items() if key not in ("architectures", "model_type", "vision_config")}
    outer = {key: value for key, value in flat.items() if key not in text}
    configs = {"flat": flat, "wrapped": {**outer, "text_config": text}, "other": {"model_type": "qwen3_vl"}}
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))

    assert read_config_file(tmp_path / "flat.json") == read_config_file(tmp_path / "wrapped.json")
    with pytest.raises(ConfigurationError, match="no text_config"):
        read_config_file(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("ids", "reason"), [(list(range(33)), "33 ids, and 32 are most"), ([5, -1], "-1, which is no token")]
)
def test_eos_ids_that_cannot_be_served_are_refused(tmp_path: Path, ids: list[int], reason: str) -> None:
    """Too many for what min_tokens hides, or none of a vocabulary."""
    with pytest.raises(ConfigurationError, match=f"eos_token_id has {reason}"):
        read_model_config(build_model(tmp_path, eos_token_id=ids))


def test_eos_ids_of_two_files_are_refused_for_both(tmp_path: Path) -> None:
    """And not for config.json alone, which has one here."""
    (model := build_model(tmp_path, eos_token_id=0)).joinpath("generation_config.json").write_text(
        json.dumps({"eos_token_id": list(range(33))})
    )
    with pytest.raises(ConfigurationError, match=r"eos_token_id, here and in generation_config.json, has 33 ids"):
        read_model_config(model)


@pytest.mark.parametrize("ignored", [0, MOST_EOS_TOKEN_IDS])
def test_as_many_stop_ids_as_a_model_and_a_request_may_have_are_hidden(ignored: int) -> None:
    """With min_tokens, the largest number of each, also where the model's do not end it."""
    ids = range(MAX_STOP_TOKEN_IDS + MOST_EOS_TOKEN_IDS)
    stops, others = frozenset(ids[ignored:]), frozenset(ids[:ignored])
    sequence = Sequence("a", [1], SamplingParams(min_tokens=2), stops, 4, seed=0, ignored_token_ids=others)

    assert set(bias_of(sequence, 500).hidden_ids.tolist()) == set(ids)


def test_a_config_that_transformers_wrote_reads_the_same(tmp_path: Path) -> None:
    """The config.json of transformers' own save_pretrained comes down to what its class was given."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    sizes = {key: value for key, value in SIZES.items() if key != "bos_token_id"}
    written = {
        "llama": (LlamaConfig(**sizes), {}),
        "mistral": (MistralConfig(**sizes, sliding_window=8), {"windows": (8,) * 3}),
        "qwen2": (
            Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8, max_window_layers=2),
            {"qkv_bias": True, "windows": (None, None, 8)},
        ),
        "qwen3": (
            Qwen3Config(**sizes, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            {"qk_norm": True, "head_dim": 16, "rope": RopeSpec(theta=1e6)},
        ),
    }

    for family, (config, expected) in written.items():
        directory = tmp_path / family
        config.save_pretrained(directory)
        (directory / "model.safetensors").touch()
        assert read_model_config(directory) == build_spec(**expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "gptj"}, "model_type 'gptj' is not supported; supported are .*gemma2, .* qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* supported are"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu, swish, gelu"),
        (
            {"quantization_config": {"quant_method": "gguf"}},
            r"quantization_config has .*gguf.*, which is not read; read are fp8, ",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; supported: 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "'axial' .* supported: default, linear, dynamic, llama3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}}, "rope parameters: .*unknown field `alpha`"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "'longrope' needs short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 6, "short_factor": [1.0]}},
            "short_factor has 1 entries for 6 rotated pairs",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta 0.1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 4.5}},
            "low_freq_factor 4.5 must not be above high_freq_factor 4.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"rope_theta": 0}, "> 0.*rope_theta"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' .* supported: float32, float16, bfloat16"),
        ({"vocab_size": 0}, ">= 1.*vocab_size"),
        ({"hidden_size": "48"}, "`int`.*hidden_size"),
        ({"num_hidden_layers": -1}, ">= 1.*num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "<= 4096.*num_hidden_layers"),
        ({"hidden_size": 10**12}, "<= 2147483647.*hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "rope parameters: .*<= 1e\\+30.*factor"),
        ({"rms_norm_eps": 0}, "> 0.*rms_norm_eps"),
        ({"num_attention_heads": 5}, "num_key_value_heads 2 does not divide num_attention_heads 5"),
        ({"num_attention_heads": 10}, "num_attention_heads 10 does not divide hidden_size 48"),
        ({"num_attention_heads": 16}, "head_dim 3 must be even"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding window is in use"),
        (
            {"layer_types": ["chunked_attention"] * 3},
            "chunked_attention.* supported: full_attention, sliding_attention",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """A config.json that asks for something else is refused by name, with what is supported or expected."""
    directory = build_model(tmp_path, **given)

    with pytest.raises(ConfigurationError, match=message) as refusal:
        read_model_config(directory)

    assert str(directory / "config.json") in str(refusal.value)


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        ("gemma3", {"rope_parameters": {"sliding_attention": 7}}, "a sliding_attention that is not an object"),
        ("gemma4", {"rope_parameters": {"full_attention": {}}}, "no sliding_attention that is an object"),
        ("phi3", {"partial_rotary_factor": 1e308}, "<= 1.*partial_rotary_factor"),
        ("glm4_moe", {"num_nextn_predict_layers": 10**12}, "<= 4096.*num_nextn_predict_layers"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("gpt2", {"n_inner": -1}, ">= 1.*intermediate_size"),
        ("gpt2", {"hidden_size": 32}, "n_embd and hidden_size are two names of one key, and differ"),
        ("gpt_bigcode", {"n_head": 3}, "num_attention_heads 3 does not divide hidden_size 64"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 beside hidden_size 64, .* is not supported"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported; supported: True"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
        ("opt", {"activation_function": "tanh"}, "hidden_act 'tanh' is not supported"),
    ],
)
def test_nonsense_in_a_family_s_own_keys_is_refused(
    tmp_path: Path, variant: str, given: dict[str, Any], message: str
) -> None:
    """In words, whatever config.json has."""
    (tmp_path / "config.json").write_text(json.dumps({**VARIANTS[variant].config, **given}))

    with pytest.raises(ConfigurationError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("deepseek_v3", ("first_k_dense_replace", "v_head_dim", "routed_scaling_factor")),
        ("dots1", ("max_window_layers", "first_k_dense_replace")),
        ("granite_moe", ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
        ("granite_hybrid", ("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "num_experts_per_tok")),
        ("ernie4_5_moe", ("moe_num_shared_experts", "moe_layer_end_index", "moe_layer_interval")),
        ("gemma2", ("hidden_activation", "max_window_layers", "rms_norm_eps")),
        ("gpt2", ("n_inner", "layer_norm_epsilon", "activation_function")),
        ("opt", ("word_embed_proj_dim", "activation_function")),
    ],
)
def test_a_null_is_as_good_as_no_key(tmp_path: Path, variant: str, keys: tuple[str, ...]) -> None:
    """Where the key has no null among its values; the types of transformers accept it."""
    config = {**VARIANTS[variant].config, "mamba_n_heads": 8, "mamba_d_head": "auto"}
    for key in keys:
        without = {name: value for name, value in config.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(without))
        expected = read_model_config(tmp_path)

        (tmp_path / "config.json").write_text(json.dumps({**without, key: None}))

        assert read_model_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("variant", "key", "same"),
    [
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "rope_interleave", False),
        ("llama3", "attention_bias", False),
        ("deepseek_v3", "n_group", 1),
        ("deepseek_v3", "topk_group", 1),
    ],
)
def test_a_switch_that_is_null_is_off(tmp_path: Path, variant: str, key: str, same: Any) -> None:
    """Whatever its default, and experts without a number of groups have one."""
    read = []
    for value in (None, same):
        config = {**VARIANTS[variant].config, **({"topk_group": 1} if key == "n_group" else {}), key: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read.append(read_model_config(tmp_path))

    assert read[0] == read[1]


@pytest.mark.parametrize("where", ["beside", "inside"])
def test_yarn_without_a_factor_stretches_to_the_context(tmp_path: Path, where: str) -> None:
    """From the original one, as in transformers; a null for truncate is no."""
    original = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "yarn", "factor": None, "truncate": None, **(original if where == "inside" else {})}
    given = {"rope_scaling": rope, "max_position_embeddings": 64, **(original if where == "beside" else {})}
    told = {**rope, "factor": 4.0, "truncate": False}

    read = read_model_config(build_model(tmp_path / "without", **given))

    assert read == read_model_config(build_model(tmp_path / "with", **{**given, "rope_scaling": told}))
    with pytest.raises(ConfigurationError, match="'yarn' needs factor"):
        read_model_config(build_model(tmp_path / "neither", rope_scaling={"rope_type": "yarn"}))


def test_a_missing_size_is_refused(tmp_path: Path) -> None:
    """A config.json without one of the sizes is refused, naming it."""
    directory = build_model(tmp_path, without=("intermediate_size",))

    with pytest.raises(ConfigurationError, match="intermediate_size"):
        read_model_config(directory)


def test_a_family_is_known_by_name_before_jax_is_imported(tmp_path: Path) -> None:
    """What the files of families declare is what they are, and a model of another is refused by that alone."""
    families = families_in(FAMILIES)
    directory = build_model(tmp_path, model_type="mamba")

    assert named_families() == {name: family.architecture for name, family in families.items()}
    with pytest.raises(
        ConfigurationError, match=r"model_type 'mamba' is not supported; supported are .*gemma2, .*qwen3"
    ):
        check_family(directory)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    """A path to nothing, such as a model's name on a hub, is refused as no directory."""
    with pytest.raises(ConfigurationError, match="is not a directory: give the path"):
        read_model_config(tmp_path / "meta-llama" / "Llama-3.2-1B")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    """A directory without config.json is refused, naming the file."""
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("content", ["", '{"model_type": "llama"', '["llama"]', "\udcff"])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    """A config.json that is no JSON object is refused, naming the file."""
    directory = build_model(tmp_path)
    (directory / "config.json").write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_model_config(directory)


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    """A generation_config.json that is no JSON is refused, naming the file."""
    directory = build_model(tmp_path)
    (directory / "generation_config.json").write_text("{")

    with pytest.raises(ConfigurationError, match=r"generation_config\.json cannot be read"):
        read_model_config(directory)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "neither model.safetensors nor model.safetensors.index.json: download"),
        (("pytorch_model.bin",), "only PyTorch pickles.*save_pretrained"),
        (("consolidated.00.pth",), "only PyTorch pickles"),
        (("tiny.gguf",), "only GGUF files, which are not read"),
        (("consolidated.safetensors",), "only consolidated.safetensors, whose tensors have Mistral's own names"),
        (("mine.safetensors",), "only mine.safetensors: add the index or rename"),
    ],
)
def test_a_directory_without_weights_is_refused(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    """A model without the safetensors files that we look for is refused, saying what is there instead."""
    directory = build_model(tmp_path)
    (directory / "model.safetensors").unlink()
    for name in files:
        (directory / name).touch()

    with pytest.raises(ConfigurationError, match=message):
        check_weights(directory)


@pytest.mark.parametrize(
    ("name", "files"), [("config.json", 1), ("model.safetensors", 1), ("model-00002-of-00002.", 2)]
)
def test_a_snapshot_without_the_cache_around_it_is_refused(tmp_path: Path, name: str, files: int) -> None:
    """Its files are links to others beside it, which a copy or a mount of the snapshot alone leaves behind."""
    directory = build_checkpoint(tmp_path / "snapshots" / "0123", files=files)
    [path] = directory.glob(f"{name}*")
    path.unlink()
    path.symlink_to(Path("..", "..", "blobs", "4567"))

    with pytest.raises(ConfigurationError, match=rf"/{name}.* is a link to \.\./\.\./blobs/4567, which is not there"):
        read_model_config(directory)
        check_weights(directory)


def test_keys_may_have_the_names_of_transformers_attributes(tmp_path: Path) -> None:
    """GPT-2's are its own, and transformers takes both."""
    config = VARIANTS["gpt2"].config
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = read_model_config(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps({names.get(key, key): config[key] for key in config}))

    assert read_model_config(tmp_path) == expected
    assert (expected.position_rows, expected.num_layers, expected.hidden_size) == (64, 3, 64)


def test_gpt2_may_divide_the_scores_of_a_layer_by_its_number(tmp_path: Path) -> None:
    """As some of its kin were trained."""
    config = {**VARIANTS["gpt2"].config, "scale_attn_by_inverse_layer_idx": True}
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = read_model_config(tmp_path)

    assert [self_attention(block).scores.scale for block in model.blocks] == [1 / 4, 1 / 8, 1 / 12]
