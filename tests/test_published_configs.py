"""The config.json of models as they are published: a checkpoint of our own has the keys that we thought of."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.model_config import read_config_file

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
REWRITTEN = ", written by transformers 5"
GPT2_NAMES = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"}


def read(directory: Path, name: str) -> Any:
    """The ModelSpec of a published model."""
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    return read_config_file(directory / "config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_served(tmp_path: Path, name: str) -> None:
    """With the sizes that stand in its config.json, quantised or not, a text model alone or within one for images."""
    text = CONFIGS[name].get("text_config") or CONFIGS[name]
    text = {GPT2_NAMES.get(key, key): value for key, value in text.items()}

    model = read(tmp_path, name)

    assert (model.num_layers, model.hidden_size) == (text["num_hidden_layers"], text["hidden_size"])
    assert {block.mixer.num_heads for block in model.blocks if isinstance(block.mixer, SelfAttentionSpec)} in (
        set(),
        {text["num_attention_heads"]},
    )
    experts = {block.feed_forward.num_experts for block in model.blocks if isinstance(block.feed_forward, ExpertsSpec)}
    named = {text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")} - {None, 0}
    assert experts == named


@pytest.mark.parametrize("name", [name.removesuffix(REWRITTEN) for name in CONFIGS if name.endswith(REWRITTEN)])
def test_transformers_writes_the_same_model_again(tmp_path: Path, name: str) -> None:
    """A fine-tune has its config.json from there."""
    assert read(tmp_path, name + REWRITTEN).blocks == read(tmp_path, name).blocks
