"""Checkpoints as EasyDeL saves them, with the writer that it uses: eformer's."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors
from flax import nnx
from loading import FLOAT32, load
from tokenizer_files import build_byte_level, write_tokenizer

from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.hub.obtain import obtained
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.sources.easydel import TENSORSTORE_INDEX, easydel_checkpoint
from engine.models.weights.sources.fingerprint import fingerprint
from engine.models.weights.sources.opening import check_weights, open_weights
from engine.models.weights.store import load_decoder
from ipc.service.facts_alike import _facts_of_files

pytestmark = pytest.mark.filterwarnings("default")


def save(directory: Path, variant: str, *, fused: bool = False, newer: bool = False) -> Path:
    """A variant's weights as EasyDeL's modules have them: kernels [inputs, outputs], under the names of its modules.

    ``newer`` has EasyDeL's names since its modules are spectrax's; ``fused`` are gate and up in one array.
    """
    from eformer.serialization import Checkpointer

    tensors = random_tensors(VARIANTS[variant].config, VARIANTS[variant].seed)
    if fused:
        for layer in range(VARIANTS[variant].config["num_hidden_layers"]):
            parts = [tensors.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]
            tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        *modules, kind = name.split(".")
        table = modules[-1] == "embed_tokens"
        leaf = kind if newer or kind == "bias" else "embedding" if table else "kernel"
        branch = tree
        for module in modules:
            branch = branch.setdefault(int(module) if module.isdecimal() else module, {})
        branch[leaf] = jnp.asarray(array if array.ndim == 1 or table else array.T)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(VARIANTS[variant].config))
    Checkpointer(str(directory), save_interval=None, step_policies=[]).save_pytree(tree, prefix="model")
    return directory


@pytest.mark.parametrize(
    ("variant", "devices", "layout"),
    [("qwen3", 1, {}), ("llama_linear", 2, {}), ("qwen3", 2, {"newer": True, "fused": True})],
)
def test_it_is_the_same_model_as_hugging_faces(
    tmp_path: Path, variant: str, devices: int, layout: dict[str, Any]
) -> None:
    """To the bit, on one device and on two, whose parts are read for each alone."""
    directory = save(tmp_path / "easydel", variant, **layout)

    check_weights(directory)
    with open_weights(directory) as source:
        partition = split(read_model_config(directory), devices)
        mesh = DeviceMesh(tuple(jax.local_devices()[:devices]))
        decoder = load_decoder(source, partition, FLOAT32, mesh=mesh, progress=lambda done, total: None)

    theirs = load(build_checkpoint(tmp_path / "hugging_face", variant), devices=devices)
    for ours, other in zip(jax.tree.leaves(nnx.state(decoder)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))


def test_of_a_training_directory_the_newest_checkpoint_is_served(tmp_path: Path) -> None:
    """By the dates that eformer has written; it is called as the directory is."""
    from eformer.serialization.checkpointer import _write_checkpoint_metadata

    for step in (20, 3):
        run = tmp_path / "my-run" / f"run-{step}"
        run.mkdir(parents=True)
        write_tokenizer(run, build_byte_level())
        (run / "config.json").write_text(json.dumps(VARIANTS["qwen3"].config))
        _write_checkpoint_metadata(str(run), step=step, is_temporary=False)

    config = obtained(EngineConfig(model=str(tmp_path / "my-run")), lambda progress: None)

    assert (config.directory.name, config.served_model_name) == ("run-3", ("my-run",))


def test_a_missing_array_and_a_missing_model_are_named(tmp_path: Path) -> None:
    """Where it should be, and what there is instead."""
    directory = save(tmp_path / "easydel", "qwen2")
    with open_weights(directory) as source:
        name = "model.layers.1.self_attn.q_proj.weight"
        shutil.rmtree(directory / "model/model/layers/1/self_attn/q_proj/kernel")
        with pytest.raises(ConfigurationError, match=r"layers/1/self_attn/q_proj/kernel cannot be read"):
            source.read(name, (slice(None), slice(None)))
    (directory / TENSORSTORE_INDEX).write_text('{"format": "tensorstore", "prefixes": {"tx": []}}')
    with pytest.raises(ConfigurationError, match="has no 'model', only tx"):
        easydel_checkpoint(directory, None)


def test_checkpoints_that_differ_are_told_apart_on_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their numbers in an update, and by their files at the start."""
    places = [save(tmp_path / name, "qwen2") for name in ("one", "same", "other")]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    kernel = next(places[2].glob("model/model/layers/0/self_attn/q_proj/kernel/0.0*"))
    kernel.write_bytes(next(places[2].glob("model/model/layers/1/self_attn/q_proj/kernel/0.0*")).read_bytes())
    found = []
    for place in places:
        with open_weights(place) as source:
            found.append(fingerprint(source))
    facts = [_facts_of_files(place)["the checkpoint"] for place in places]

    assert found[0] == found[1] != found[2]
    assert all("tensorstore" in fact for fact in facts)


def test_a_head_that_easydel_ignores_is_ignored(tmp_path: Path) -> None:
    """It keeps one beside tied embeddings, whatever that holds."""
    directory = save(tmp_path / "easydel", "qwen2")
    index = json.loads((directory / TENSORSTORE_INDEX).read_text())
    index["prefixes"]["model"].append({"path": "model/lm_head/kernel", "shape": [48, 144], "dtype": "float32"})
    (directory / TENSORSTORE_INDEX).write_text(json.dumps(index))

    with open_weights(directory) as source:
        assert "lm_head.weight" not in source.names
