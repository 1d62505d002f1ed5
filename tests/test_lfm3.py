"""What LFM3's config.json comes down to, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS

from engine.errors import ConfigurationError
from engine.models.layers.short_convolution import ShortConvolutionSpec
from engine.models.model_config import read_config_file
from engine.models.rope_spec import RopeSpec

ROPES = {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}


def read(directory: Path, **overrides: Any) -> Any:
    """The ModelSpec of the golden's config.json with other values; those that are ... are left out."""
    config = {key: value for key, value in {**VARIANTS["lfm3"].config, **overrides}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config_file(directory / "config.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache 1 is not supported"),
        ({"sliding_window": None}, "no sliding window is in use"),
        ({"layer_types": ["conv"] * 5}, "without any layer of full attention"),
        ({"layer_types": ["conv", "mamba", *["full_attention"] * 3]}, "layer_types 'mamba' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
        (
            {"rope_parameters": {"rope_theta": 100.0}},
            "rope_parameters has rope_theta; supported are full_attention and",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters has type; supported are full_attention"),
        ({"rope_parameters": {}}, "rope_parameters has no full_attention that is an object"),
        ({"rope_parameters": {**ROPES, "sliding_attention": None}}, "has no sliding_attention that is an object"),
        (
            {"rope_parameters": {**ROPES, "sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5 is not supported",
        ),
    ],
    ids=str,
)
def test_what_lfm3_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """By the names in config.json."""
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, **given)


def test_what_lfm3_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    """Every second layer behind the first two has attention, full and windowed in turn, each with its rope."""
    left_out = ("layer_types", "rope_parameters", "sliding_window", "head_dim")
    model = read(tmp_path, num_hidden_layers=7, **dict.fromkeys(left_out, ...))

    assert [isinstance(block.mixer, ShortConvolutionSpec) for block in model.blocks] == [
        True,
        True,
        *[False, True] * 2,
        False,
    ]
    full, sliding = model.blocks[2].mixer, model.blocks[4].mixer
    assert (full.scores.reach, sliding.scores.reach, full.head_dim) == (None, 256, 128)
    assert full == model.blocks[6].mixer
    assert sliding.rope == RopeSpec(theta=10_000.0)
    assert full.rope == RopeSpec(theta=1_000_000.0, scaling="proportional", turning_pairs=32)
    assert model.blocks[1].mixer.taps == 7


@pytest.mark.parametrize(
    ("given", "eps"),
    [({"norm_eps": ...}, 1e-5), ({}, 1e-4), ({"rms_norm_eps": 1e-3}, 1e-3), ({"rms_norm_eps": None}, 1e-4)],
    ids=str,
)
def test_either_name_of_lfm3s_epsilon_is_read(tmp_path: Path, given: dict[str, Any], eps: float) -> None:
    """transformers reads ``rms_norm_eps`` as another name of ``norm_eps``, whichever comes first."""
    assert read(tmp_path, **{"rms_norm_eps": ..., **given}).rms_norm_eps == eps


@pytest.mark.parametrize("has_them", [True, False])
def test_lfm3_may_be_without_gates_and_norms_behind(tmp_path: Path, has_them: bool) -> None:
    """Neither has tensors then."""
    model = read(tmp_path, use_attention_gate=has_them, use_sandwich_norm=has_them)

    gates = [(block.mixer.gate_proj, block.mixer.gates_by_head) for block in model.blocks[1::2]]
    assert gates == [(has_them, has_them)] * 2
    assert {block.norms.after for block in model.blocks} == {has_them}
    own = {"attention.gate_kernel", "attention_post_norm.scale", "mlp_post_norm.scale"}
    assert dict(model.tensors).keys() & own == (own if has_them else set())
