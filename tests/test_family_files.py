"""A family is a file in a folder: what it may say of its checkpoints, and how its layers are grouped."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from loading import FLOAT32, load

from caching.attention.spec import AttentionSpec
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.spec import BlockSpec, LayerGroup, layer_plan
from engine.models.weights.parameters import Parameter, Role, TensorRule, tensors
from engine.models.weights.pieces import assemble
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import load_decoder

FUSED = """
from engine.models.family import Family, decoder_spec
from engine.models.weights.parameters import LAYER, tensors

FAMILY = Family(
    "fused",
    "FusedForCausalLM",
    decoder_spec,
    tensors={
        "attention.qkv_kernel": tensors(*[f"{LAYER}self_attn.qkv_proj.weight"] * 3, along="group"),
        "mlp.gate_up_kernel": tensors(*[f"{LAYER}mlp.gate_up_proj.weight"] * 2, along="gate_up"),
    },
)
"""


def build_fused(directory: Path) -> Path:
    """The llama3 variant as a family that stores q, k and v as one tensor, and gate and up, as Phi-3 does."""
    config = {**VARIANTS["llama3"].config, "model_type": "fused", "architectures": ["FusedForCausalLM"]}
    stored = random_tensors(VARIANTS["llama3"].config, VARIANTS["llama3"].seed)
    for layer in range(config["num_hidden_layers"]):
        for module, parts in (("self_attn.qkv_proj", "q k v"), ("mlp.gate_up_proj", "gate up")):
            prefix = f"model.layers.{layer}.{module.split('.')[0]}"
            found = [stored.pop(f"{prefix}.{part}_proj.weight") for part in parts.split()]
            stored[f"model.layers.{layer}.{module}.weight"] = np.concatenate(found)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_tensors(directory, stored)
    return directory


@pytest.mark.parametrize("devices", [1, 2])
def test_a_family_is_found_in_its_folder_and_cuts_fused_tensors(tmp_path: Path, devices: int) -> None:
    """A file in a folder of families is all that a family is; a tensor that a rule names several times is cut."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "fused.py").write_text(FUSED)
    model = read_model_config(build_fused(tmp_path / "fused"), families=tmp_path / "families")

    checkpoint, mesh = open_checkpoint(tmp_path / "fused"), DeviceMesh(tuple(jax.devices()[:devices]))
    decoder = load_decoder(checkpoint, split(model, devices), FLOAT32, mesh=mesh, progress=lambda done, total: None)

    plain = load(build_checkpoint(tmp_path / "plain", "llama3"), devices=devices)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(decoder)), jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    with pytest.raises(ConfigurationError, match="'fused' is not supported"):
        read_model_config(tmp_path / "fused")


EXPERTS = {"hidden": 6, "experts": 3, "gate_up": 2, "ffn": 4}


@pytest.mark.parametrize(
    ("rule", "stacked"),
    [
        (tensors("{layer}.{experts}.w1", "{layer}.{experts}.w3", along="gate_up"), False),
        (tensors("{layer}.gate_up", stored="experts hidden (gate_up ffn)"), True),
    ],
)
def test_experts_are_stacked_whether_a_checkpoint_has_them_apart_or_together(rule: TensorRule, stacked: bool) -> None:
    """One tensor for each expert, transposed as torch has it, or one of all: a device reads its own columns."""
    whole = np.random.default_rng(0).standard_normal(tuple(EXPERTS.values())).astype(np.float32)
    apart = {f"5.{expert}.w{1 + 2 * part}": whole[:, expert, part].T for expert in range(3) for part in range(2)}
    together = {"5.gate_up": whole.transpose(1, 0, 2, 3).reshape(3, 6, 8)}
    parameter = Parameter("mlp.experts", Role.KERNEL, tuple(EXPERTS.items()), rule, inputs=1)
    index = (*[slice(None)] * 3, slice(2, 4))

    part = assemble(Arrays(together if stacked else apart), parameter, 5, index, np.dtype(np.float32))

    np.testing.assert_array_equal(part, whole[..., 2:4])


def block(window: int | None) -> BlockSpec:
    """A layer with a window."""
    return BlockSpec(SelfAttentionSpec(4, 2, 8, AttentionSpec(1.0, window)), GatedSpec(16))


FULL, SLIDES = block(None), block(8)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((FULL,) * 5, [((FULL,), 5)]),
        ((SLIDES, FULL) * 13, [((SLIDES, FULL), 13)]),
        (((SLIDES,) * 5 + (FULL,)) * 10 + (SLIDES,) * 2, [((SLIDES,) * 5 + (FULL,), 10), ((SLIDES,), 2)]),
        ((FULL,) * 2 + (SLIDES,) * 3, [((FULL,), 2), ((SLIDES,), 3)]),
        ((SLIDES, FULL, SLIDES), [((SLIDES,), 1), ((FULL,), 1), ((SLIDES,), 1)]),
    ],
)
def test_layers_that_repeat_are_one_group(blocks: tuple[BlockSpec, ...], expected: list) -> None:
    """A pattern of five to one, or one to one, is a single loop of that many layers."""
    assert layer_plan(blocks) == tuple(LayerGroup(*group) for group in expected)
