"""A model split over devices says what it says on one, and the devices tell each other no more than they have to."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors
from flax import nnx
from moe_checkpoints import MOE_VARIANTS
from xla_flags import xla_flags

from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.models.model_config import read_model_config
from engine.models.partition import Partition, most_devices, split
from engine.models.spec import layer_plan
from engine.models.weights.factory import declared
from engine.models.weights.parameters import AXES
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.store import abstract_decoder, load_decoder, parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.served_model import split_over_devices
from engine.step.backend_choice import xla_backend
from engine.step.forward_programs import ForwardPrograms
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes
from engine.step.sampling_programs import SamplingPrograms
from engine.step.step_shapes import StepShapes

ROOT = Path(__file__).parent.parent
FLOAT32 = np.dtype(np.float32)
XLA = xla_backend(FLOAT32)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 700}
"""What 1, 2, 4 and 8 devices divide, with less kv heads than devices and a vocabulary that has to be padded."""

SPLIT = ("qwen3_moe_plain", "gpt_oss", "glm4_moe", "llama4", "gemma4_moe", "deepseek_v3", "qwen3_5")
"""Of every way in which layers are split a variant: experts whose number no device divides, with biases, shared ones beside
dense layers, in chunks, beside a dense product, with latents, and recurrent states. Thorough runs try them on four devices; two,
and the others, are exhaustive."""


@pytest.fixture
def two() -> DeviceMesh:
    """The first devices of the suite's two."""
    return DeviceMesh(tuple(jax.devices()[:2]))


@pytest.mark.parametrize(
    ("variant", "quantization", "numbers"),
    [
        pytest.param("qwen2", "none", ["2", "4", "8"], marks=pytest.mark.thorough),
        *(
            pytest.param(
                variant,
                "none",
                [number],
                marks=pytest.mark.thorough if number == "4" and variant in SPLIT else pytest.mark.exhaustive,
            )
            for variant in (*MOE_VARIANTS, "qwen3_5")
            for number in ("2", "4")
        ),
        pytest.param("mixtral", "int4", ["2"], marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", "int4", ["2"], marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_do_not_depend_on_the_number_of_devices(
    tmp_path: Path, variant: str, quantization: str, numbers: list[str]
) -> None:
    """Greedy, drawn, truncated, penalised, biased and with log-probabilities: so many devices give what one gives."""
    sizes = {key: HEADS[key] for key in HEADS if key != "intermediate_size" or variant == "qwen2"}
    if "kv_lora_rank" in VARIANTS[variant].config:  # latents have no kv heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if quantization == "int4":  # groups of the same size on every device
        sizes |= {"hidden_size": 64, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 32}
    build_checkpoint(tmp_path / "model", variant, **sizes)
    program = Path(__file__).parent / "spread_model.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=8)}

    command = [sys.executable, program, tmp_path / "model", quantization, "1", *numbers]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    by_devices = json.loads(run.stdout)
    alone = by_devices.pop("1")
    assert sorted(by_devices) == numbers
    assert len({tuple(answer["tokens"]) for answer in alone}) == len(alone)
    for devices, answers in by_devices.items():
        for answer, expected in zip(answers, alone, strict=True):
            assert answer["tokens"] == expected["tokens"], (devices, answer["params"])
            np.testing.assert_allclose(answer["logprobs"], expected["logprobs"], atol=1e-4)


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("layout", [Layout.AXES, Layout.MATRIX])
@pytest.mark.parametrize(
    "variant",
    ["llama2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama_linear", "qwen3_sharded"))],
)
def test_every_device_has_its_part_of_the_model(
    tmp_path: Path, two: DeviceMesh, variant: str, layout: Layout, scans: bool
) -> None:
    """Put together, in whatever form a backend reads them, the parts are the tensors of the checkpoint."""
    model = read_model_config(build_checkpoint(tmp_path, variant))
    partition, form = split(model, 2), WeightFormat(FLOAT32, layout, scans)
    placed: list[int] = []

    checkpoint = open_checkpoint(tmp_path)
    decoder = load_decoder(checkpoint, partition, form, mesh=two, progress=lambda done, _: placed.append(done))

    abstract = abstract_decoder(partition, form, mesh=two)
    leaves = jax.tree.leaves(jax.tree.map(lambda leaf: leaf, _state(decoder)))
    for leaf, foretold in zip(leaves, jax.tree.leaves(_state(abstract)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (foretold.shape, foretold.dtype, foretold.sharding)
    tensors = random_tensors(VARIANTS[variant].config, VARIANTS[variant].seed)
    stack, place = (decoder.layers[-1].blocks[-1], -1) if scans else (decoder.layers[-1], None)
    down, gate_up = (kernel.get_value().values for kernel in (stack.mlp.down_kernel, stack.mlp.gate_up_kernel))
    down = np.asarray(down if place is None else down[place])
    np.testing.assert_array_equal(down.T, tensors[f"model.layers.{model.num_layers - 1}.mlp.down_proj.weight"])
    halves = [np.asarray(shard.data) for shard in gate_up.addressable_shards]
    gate = tensors[f"model.layers.{model.num_layers - 1}.mlp.gate_proj.weight"]
    width = len(gate) // 2
    for number, half in enumerate(halves):
        own = half[place] if scans else half
        own = own.reshape(own.shape[0], 2, width)[:, 0].T
        np.testing.assert_array_equal(own, gate[number * width : (number + 1) * width])
    each = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert each == parameter_bytes(partition, form)
    assert placed == sorted(placed)


def _state(decoder):
    return nnx.state(decoder)


@pytest.mark.thorough
def test_every_parameter_has_a_rule(tmp_path: Path) -> None:
    """None is copied to all devices because nobody thought of it."""
    for variant in VARIANTS.values():
        (tmp_path / "config.json").write_text(json.dumps(variant.config))
        model = read_model_config(tmp_path)
        decoder = abstract_decoder(Partition(model), WeightFormat(FLOAT32), mesh=DeviceMesh((jax.devices()[0],)))
        for _, variable in nnx.to_flat_state(_state(decoder)):
            assert set(declared(variable).names) <= AXES.keys(), declared(variable).name


def test_kv_heads_are_repeated_where_devices_are_more(tmp_path: Path) -> None:
    """Each device has the one kv head that its query heads belong to."""
    partition = split(read_model_config(build_checkpoint(tmp_path, "qwen2", **HEADS)), 8)

    assert (partition.kv_replicas, partition.stored_kv_heads, partition.kv_heads_each) == (2, 8, 1)
    assert XLA.one_page(partition, 16, FLOAT32).num_kv_heads == 1
    assert partition.padded_vocab_size == 1024


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12},
            "the 6 attention heads; it can be 1 or 2",
        ),
        ({"intermediate_size": 90}, "the 90 columns of the feed-forward; it can be 1 or 2"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 12},
            "the 3 kv heads, nor they it; it can be 1",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(tmp_path: Path, changed: dict, named: str) -> None:
    """With what would do instead."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2", **changed))

    with pytest.raises(ConfigurationError, match=re.escape(f"tensor_parallel_size 4 does not divide {named}")):
        split(model, 4)


def test_an_operator_hears_how_many_devices_there_are(tmp_path: Path) -> None:
    """More than the machine has is refused; on a CPU one is the default, for its cores are no devices."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2"))

    assert split_over_devices(EngineConfig(), model).devices == 1
    assert split_over_devices(EngineConfig(tensor_parallel_size=2), model).devices == 2
    with pytest.raises(ConfigurationError, match="tensor_parallel_size 64 is more than the"):
        split_over_devices(EngineConfig(tensor_parallel_size=64), model)
    assert most_devices(model, 64) == 4


@pytest.mark.parametrize(
    ("variant", "scans"),
    [
        ("qwen3", True),
        *(pytest.param(*rest, marks=pytest.mark.thorough) for rest in (("qwen3", False), ("qwen2_moe", True))),
    ],
)
def test_a_layer_has_two_sums_and_nothing_is_gathered(
    tmp_path: Path, two: DeviceMesh, variant: str, scans: bool
) -> None:
    """All that devices say to each other in a step is the embedding and two sums a layer, a shared expert's in one of them."""
    model = read_model_config(build_checkpoint(tmp_path, variant))
    partition, backend = split(model, 2), replace(XLA, scans=scans)
    pool = replace(backend.one_page(partition, 4, FLOAT32), num_pages=9)
    shapes = StepShapes(4, 8, 16, pool)
    decoder = abstract_decoder(partition, backend.weight_format(FLOAT32), mesh=two)

    program = ForwardPrograms(decoder, backend, pool, shapes.slots, two).lower(shapes.layout(8)).compile().as_text()

    layers = sum(len(group.period) for group in layer_plan(model.blocks)) if scans else model.num_layers
    assert len(re.findall(r" all-reduce\(| all-reduce-start\(", program)) == 1 + 2 * layers
    assert not re.search("all-gather|all-to-all|collective-permute|reduce-scatter", program)


def test_no_device_ever_has_all_logits(two: DeviceMesh) -> None:
    """The sampler and what goes before and after it exchange blocks' sums and the likeliest, never rows of logits."""
    vocabulary, rows = 4096, 4
    programs = SamplingPrograms(SlotShapes(4, 1, 1), vocabulary, two).of(StepLayout(rows, rows))
    compiled = [program.lower().compile() for program in programs]

    largest = [
        int(np.prod([int(size) for size in shape.split(",")]))
        for function in compiled
        for shape in re.findall(r"\w+\[([\d,]+)\]\S* all-(?:gather|reduce)(?:-start)?\(", function.as_text())
    ]

    assert largest
    assert max(largest) < rows * vocabulary // 8
