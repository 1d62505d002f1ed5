"""The fingerprint of what makes a daemon's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import build_checkpoint
from fake_driver import LIMITS
from safetensors.numpy import load_file, save_file

from engine.config import EngineConfig
from engine.live.read_files import open_files
from engine.models.generation_config import GenerationConfig
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.weights.sources import fingerprint as fingerprints
from engine.models.weights.sources.fingerprint import fingerprint
from engine.models.weights.sources.opening import open_weights
from engine.served_model import ServedModel
from engine.step.backend_choice import xla_backend
from ipc.service.start_up import _fingerprint, load_tokenizer

UNREAD = "model.layers.0.self_attn.rotary_emb.inv_freq"


def engine_fingerprint(directory: Path, served: dict[str, Any] | None = None, **settings: Any) -> str:
    """Of a model with these settings, and as it is served on a machine where that is told."""
    config = EngineConfig(model=str(directory), **settings)
    partition, numbers = Partition(read_model_config(directory)), np.dtype(np.float32)
    mesh: Any = None
    backend: Any = None
    model = ServedModel(config, partition, mesh, backend, 16, numbers, numbers, GenerationConfig(), None)
    with open_weights(directory) as source:
        return replace(model, **(served or {}))._fingerprint(fingerprint(source))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in one layer."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def test_a_copy_has_the_same_and_other_weights_another(directory: Path, tmp_path: Path) -> None:
    """Of the same names and shapes, too; and how many sequences run changes nothing."""
    copy, other = (
        build_checkpoint(tmp_path / name, num_hidden_layers=1, seed=seed) for name, seed in (("a", None), ("b", 7))
    )

    assert engine_fingerprint(directory) == engine_fingerprint(copy, max_num_seqs=3) != engine_fingerprint(other)


@pytest.mark.parametrize(
    "differs",
    [
        {"seed": 1},
        {"lora_dtype": "bfloat16", "enable_lora": True},
        {"served": {"quantization": "int8"}},
        {"served": {"kv_dtype": np.dtype(np.int8)}},
        {"served": {"dtype": np.dtype(np.float16)}},
    ],
)
def test_what_changes_tokens_changes_it(directory: Path, differs: dict[str, Any]) -> None:
    """Seed and number formats; one that is named as it would be anyway is no other."""
    plain = engine_fingerprint(directory)

    assert plain == engine_fingerprint(directory, dtype="float32", lora_dtype="float32", enable_lora=True)
    assert plain != engine_fingerprint(directory, **differs)


@pytest.mark.parametrize(
    ("quantization", "intermediate_size", "is_same"),
    [("int8", 64, True), ("int4", 256, True), ("int4", 128, False), ("int4", 96, False), ("w8a8", 64, False)],
)
def test_devices_change_it_where_they_change_what_numbers_are_rounded_to(
    tmp_path: Path, quantization: str, intermediate_size: int, is_same: bool
) -> None:
    """Where a device's inputs have other groups or none, or are scaled by themselves."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    directory = build_checkpoint(tmp_path, num_hidden_layers=1, intermediate_size=intermediate_size, **sizes)
    model, backend = read_model_config(directory), xla_backend(np.dtype(np.float32))

    one, two = (
        engine_fingerprint(
            directory, {"quantization": quantization, "backend": backend, "partition": Partition(model, devices)}
        )
        for devices in (1, 2)
    )

    assert (one == two) is is_same


def test_tokenizer_and_template_change_it(tmp_path: Path) -> None:
    """They make a prompt's tokens."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    ours, same, other = (load_tokenizer(EngineConfig(chat_template=path)) for path in (None, None, template))

    assert _fingerprint("a", ours, LIMITS) == _fingerprint("a", same, LIMITS)
    assert (
        len({_fingerprint("a", ours, LIMITS), _fingerprint("a", other, LIMITS), _fingerprint("b", ours, LIMITS)}) == 3
    )


def test_a_tensor_that_no_model_reads_may_be_of_any_dtype(tmp_path: Path) -> None:
    """It is compared too."""
    plain, ours, other = (build_checkpoint(tmp_path / name, num_hidden_layers=1) for name in "abc")
    for place, truth in ((ours, True), (other, False)):
        tensors = {**load_file(place / "model.safetensors"), UNREAD: np.array([truth])}
        save_file(tensors, place / "model.safetensors")

    assert len({engine_fingerprint(place) for place in (plain, ours, other)}) == 3


def test_the_tensors_that_are_compared_are_scattered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are read; with few to compare, they are not the first by name."""
    with open_weights(directory) as mapped, open_files(directory) as read:
        asked: list[str] = []
        monkeypatch.setattr(fingerprints, "COMPARED_TENSORS", 3)
        assert fingerprint(mapped) == fingerprint(read) != fingerprint(read, of_numbers=False)
        monkeypatch.setattr(type(mapped), "beginnings", lambda _, names, count: asked.extend(names) or [])
        fingerprint(mapped)

        assert len(asked) == 3
        assert asked != sorted(mapped.names)[:3]
