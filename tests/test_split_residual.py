"""Adapters on several devices, of which each has its part of the residual stream and of every factor."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_files import AdapterKind, adapted_modules, adapter_tensors, write_adapter
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from jax.sharding import PartitionSpec
from loading import load
from plain_attention import DenseAttention

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.adapters.reader import AdapterReader
from engine.adapters.slot_arrays import AdapterSizes, adapter_bytes, slot_arrays
from engine.devices.mesh import COPY, TP, DeviceMesh
from engine.models.adapters.adapted import Adapted, AdapterRows, Masked, Parts
from engine.models.adapters.kernels import AdaptedKernel
from engine.models.adapters.split_models import splits_residual
from engine.models.adapters.split_residual import normed, own_part, whole
from engine.models.layers.norm import RMSNorm
from engine.models.layers.self_attention import self_attention
from engine.models.linear import linear
from engine.models.model_config import read_model_config
from engine.models.partition import Partition, split
from engine.models.spec import Multipliers, layer_plan
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.forms import Dense
from engine.models.weights.parameters import tensors
from engine.models.weights.store import abstract_decoder
from engine.models.weights.weight_format import Layout
from engine.step.backend_choice import xla_backend
from engine.step.compilation import num_compilations
from engine.step.forward_programs import ForwardPrograms
from engine.step.split_decoder import SplitDecoder
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
XLA = xla_backend(FLOAT32)
HIDDEN, FFN, RANK, SLOTS, DEVICES = 48, 12, 3, 4, 2
SIZES = AdapterSizes(2, 4, FLOAT32, XLA.layout)
ROWS = [2, -1, 0, 3, 1, 2]
"""The slot of each; -1 is none."""
EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture
def two() -> DeviceMesh:
    """The first devices of the suite's two."""
    return DeviceMesh(tuple(jax.devices()[:DEVICES]))


def random(*shape: int) -> np.ndarray:
    """Numbers that depend on the shape alone."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def adapted(base: jax.Array, a: jax.Array, b: Sequence[jax.Array], out: tuple[int, ...]) -> Adapted:
    """A kernel f[in, prod(out)] with factors f[parts, slots * rank, in] and f[slots * rank, its outputs]."""
    return Adapted(Dense(base, Layout.MATRIX, out), Masked(a, tuple(b), Parts(0, (out[0] // len(b),) * len(b))))


def wanted(x: np.ndarray, base: np.ndarray, a: np.ndarray, b: list[np.ndarray]) -> np.ndarray:
    """x[T, in] by a kernel, with each row's own adapter."""
    product = x.astype(np.float64) @ base
    for row, slot in enumerate(ROWS):
        if slot >= 0:
            own = slice(slot * RANK, (slot + 1) * RANK)
            product[row] += np.concatenate([(low[own] @ x[row]) @ high[own] for low, high in zip(a, b, strict=True)])
    return product


def test_a_kernel_behind_a_norm_adds_each_rows_adapter(two: DeviceMesh) -> None:
    """By a device's inputs of ``a``, before the norm is known; gate and up have each their own factors."""
    x, scale, base = random(len(ROWS), HIDDEN), random(HIDDEN), random(HIDDEN, 2 * FFN)
    a, b = random(2, SLOTS * RANK, HIDDEN), [random(SLOTS * RANK, FFN), 2 * random(SLOTS * RANK, FFN)]

    def compute(x: jax.Array, gate: jax.Array, up: jax.Array, a: jax.Array, *b: jax.Array) -> jax.Array:
        norm = RMSNorm("n", {"hidden": HIDDEN}, 1e-6, tensors(""), ParameterFactory(nnx.Rngs(0), DEVICES, 1, {}))
        norm.scale.set_value(jnp.asarray(scale))
        kernel = adapted(jnp.concatenate([gate, up], axis=1), a, b, (2, FFN // DEVICES))
        read, rows = normed(own_part(x, TP), norm, kernel, AdapterRows(jnp.asarray(ROWS, jnp.int32), SLOTS, axis=TP))
        return linear(read, nnx.Param(kernel), None, rows)

    of_device, of_inputs = PartitionSpec(None, TP), PartitionSpec(None, None, TP)
    specs = (COPY, of_device, of_device, of_inputs, of_device, of_device)
    found = jax.jit(two.on_each(compute, specs, of_inputs))(x, *np.split(base, 2, axis=1), a, *b)

    of_norm = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(found.reshape(len(ROWS), -1), wanted(of_norm, base, a, b), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("has_adapters", [True, False])
def test_a_kernel_before_a_sum_gives_each_device_its_part(two: DeviceMesh, has_adapters: bool) -> None:
    """With its outputs of ``b`` and of the bias; also where slots have no room for the kernel."""
    x, base, bias = random(len(ROWS), FFN), random(FFN, HIDDEN), random(HIDDEN)
    a, b = random(1, SLOTS * RANK, FFN), random(SLOTS * RANK, HIDDEN)

    def compute(x: jax.Array, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        kernel = adapted(base, a, [b], (HIDDEN,))
        rows = AdapterRows(jnp.asarray(ROWS, jnp.int32), SLOTS, axis=TP)
        param = nnx.Param(kernel if has_adapters else kernel.base)
        return whole(linear(x, param, nnx.Param(jnp.asarray(bias)), rows, TP), TP)

    of_outputs = PartitionSpec(None, TP)
    specs = (of_outputs, PartitionSpec(TP, None), PartitionSpec(None, None, TP), of_outputs)
    found = jax.jit(two.on_each(compute, specs, COPY))(x, base, a, b)

    expected = wanted(x, base, a, [b]) if has_adapters else x @ base
    np.testing.assert_allclose(found, expected + bias, rtol=1e-4, atol=1e-3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneRow:
    """Causal attention over one whole row [length, heads, head_dim], a StepAttention."""

    fuses_rotation: ClassVar[bool] = False

    def __call__(
        self, spec: AttentionSpec, cache: LayerCache, place: Place, inputs: AttentionInputs
    ) -> tuple[LayerCache, jax.Array]:
        """See DenseAttention."""
        _, attended = DenseAttention()(spec, None, place, jax.tree.map(lambda x: x[None], inputs))
        return cache, attended[0]


def run(
    directory: Path, adapters: list[Path], devices: int, scans: bool, sizes: AdapterSizes, ids: range = range(2, 14)
) -> list[np.ndarray]:
    """The last hidden states of a row of tokens, and the residual stream before two layers; each token has one of
    the adapters by its id, or none."""
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    decoder = load(directory, replace(XLA, scans=scans).weight_format(FLOAT32), devices)
    split_decoder, slots = SplitDecoder(decoder), slot_arrays(decoder, sizes, mesh)
    blocks = [AdapterReader(slots).read(str(adapter)).arrays for adapter in adapters]
    axes = [axis for kernel in slots.kernels for axis in kernel.slot_axes]
    joined = [np.concatenate(each, axis=axis) for each, axis in zip(zip(*blocks, strict=True), axes, strict=True)]
    arrays = [
        jax.device_put(np.pad(array, [(0, size - width) for size, width in zip(leaf.shape, array.shape, strict=True)]),
                       mesh.sharding(*leaf.split))
        for array, leaf in zip(joined, slots.leaves, strict=True)
    ]  # fmt: skip

    def compute(weights: list[jax.Array], arrays: list[jax.Array], token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        adapted = split_decoder.decoder(slots.adapted(split_decoder.state(weights), arrays))
        rows = AdapterRows(token_ids % (len(adapters) + 1) - 1, len(adapters))
        rotations = adapted.rotations(jnp.arange(len(token_ids)))
        layers = [None] * decoder.partition.model.num_layers
        return adapted.tapped(token_ids, layers, StepContext(rotations, OneRow(), adapters=rows), (1, 2))[1:]

    on_each = mesh.on_each(compute, (split_decoder.weight_specs, slots.specs, COPY), COPY)
    return [np.asarray(x) for x in jax.jit(on_each)(split_decoder.weights, arrays, jnp.asarray(ids))]


@pytest.mark.parametrize("scans", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("granite", ()),
        ("seed_oss", ("q_proj", "down_proj")),
        *(
            pytest.param(name, (), marks=pytest.mark.thorough)
            for name in ("arcee", "gemma", "qwen3", "phi3_long", "llama_linear")
        ),
    ],
)
def test_two_devices_compute_what_one_does(tmp_path: Path, variant: str, targets: tuple[str, ...], scans: bool) -> None:
    """Of tokens of several adapters and of none, with what is tapped before a layer, whatever slots have room for."""
    directory = build_checkpoint(tmp_path / "model", variant)
    kinds = [AdapterKind("|".join(targets) or "_proj", rank, 8.0, rank) for rank in (4, 3)]
    adapters = [write_adapter(tmp_path / str(kind.rank), variant, kind) for kind in kinds]
    sizes = AdapterSizes(len(adapters), 4, FLOAT32, XLA.layout, targets)

    alone, together = (run(directory, adapters, devices, scans, sizes) for devices in (1, DEVICES))

    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), DEVICES])
def test_an_adapter_of_gates_is_added_to_their_kernel(tmp_path: Path, devices: int) -> None:
    """As to a checkpoint that it was merged into, whose own adapter is zero."""
    directory, other = (build_checkpoint(tmp_path / name, "afmoe") for name in ("model", "merged"))
    kind = AdapterKind(r"self_attn\.gate_proj", 4, 8.0, 1)
    tensors, factors = random_tensors(VARIANTS["afmoe"].config, VARIANTS["afmoe"].seed), adapter_tensors("afmoe", kind)
    adapter = write_adapter(tmp_path / "adapter", "afmoe", kind, factors)
    zero = write_adapter(tmp_path / "zero", "afmoe", kind, {name: 0 * factor for name, factor in factors.items()})
    for module in adapted_modules("afmoe", kind):
        a, b = (factors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + kind.alpha / kind.rank * b @ a
    write_tensors(other, tensors)
    sizes, ids = AdapterSizes(1, 4, FLOAT32, XLA.layout), range(3, 27, 2)

    found, expected = run(directory, [adapter], devices, True, sizes, ids), run(other, [zero], 1, True, sizes, ids)

    for one, merged in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, merged, rtol=0, atol=2e-5 * np.abs(merged).max())


@pytest.mark.parametrize("scans", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_layer_exchanges_no_more_often_with_adapters(tmp_path: Path, two: DeviceMesh, scans: bool) -> None:
    """Each of its two sums is a reduce-scatter and an all-gather; beside them is the gather behind the last layer."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2"))
    partition, backend = split(model, DEVICES), replace(XLA, scans=scans)
    pool = replace(backend.one_page(partition, 4, FLOAT32), num_pages=9)
    shapes = StepShapes(4, 8, 16, pool, adapters=SIZES)
    decoder = abstract_decoder(partition, backend.weight_format(FLOAT32), mesh=two)
    adapters = slot_arrays(decoder, SIZES, two)

    programs = ForwardPrograms(decoder, backend, pool, shapes.slots, two, adapters=adapters)
    program = programs.lower(shapes.layout(8), adapters).compile().as_text()

    layers = sum(len(group.period) for group in layer_plan(model.blocks)) if scans else model.num_layers
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", program)) for kind in EXCHANGES}
    sums = counts["reduce-scatter"]
    assert sums == 2 * layers
    of_tables = counts["all-reduce"]
    assert counts == dict.fromkeys(EXCHANGES, 0) | {
        "reduce-scatter": sums,
        "all-gather": sums + 1,
        "all-reduce": of_tables,
    }


def test_no_factor_of_a_kernel_is_whole_on_a_device(tmp_path: Path, two: DeviceMesh) -> None:
    """So each has half of what one device would have, but for two factors of the vocabulary's tables."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2"))
    partition = split(model, DEVICES)
    decoder = abstract_decoder(partition, XLA.weight_format(FLOAT32), mesh=two)

    slots = slot_arrays(decoder, SIZES, two)

    of_kernels = [kernel for kernel in slots.kernels if type(kernel) is AdaptedKernel]
    assert len(of_kernels) == 4 * model.num_layers
    for kernel in of_kernels:
        assert all(TP in leaf.split for leaf in kernel.leaves(SIZES.max_loras))
    arrays = [*slots.shapes, *(slots._shape(leaf) for leaf in slots.block)]
    on_each = sum(int(np.prod(one.sharding.shard_shape(one.shape))) * one.dtype.itemsize for one in arrays)
    assert on_each == adapter_bytes(partition, SIZES)


def test_slots_are_empty_again_without_a_compilation(tmp_path: Path, two: DeviceMesh) -> None:
    """As after a step that failed, or new weights: nothing is compiled while serving."""
    partition = split(read_model_config(build_checkpoint(tmp_path, "llama2")), DEVICES)
    slots = slot_arrays(abstract_decoder(partition, XLA.weight_format(FLOAT32), mesh=two), SIZES, two)
    slots.new()
    before = num_compilations()

    arrays = slots.new()

    assert num_compilations() == before
    assert [array.sharding for array in arrays] == [shape.sharding for shape in slots.shapes]


@pytest.mark.parametrize(
    ("variant", "devices", "splits"),
    [
        *((variant, 2, True) for variant in ("llama2", "qwen2", "phi3", "granite", "gemma")),
        *(("llama2", devices, devices == 4) for devices in (1, 4, 16)),
        *((variant, 2, False) for variant in ("gemma2", "olmo3", "mixtral", "deepseek_v3", "qwen3_next", "gemma4")),
    ],
)
def test_plain_blocks_are_split(tmp_path: Path, variant: str, devices: int, splits: bool) -> None:
    """What has a norm behind a sum, experts, latents, states or inputs by layer is not, nor anything over more chips."""
    assert splits_residual(Partition(read_model_config(build_checkpoint(tmp_path, variant)), devices)) is splits


def test_a_block_with_a_kernel_of_gates_is_not_split(tmp_path: Path) -> None:
    """The norm's exchange has the products of one kernel's factors."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2"))
    blocks = (replace(block, mixer=replace(self_attention(block), gate_proj=True)) for block in model.blocks)

    assert not splits_residual(Partition(replace(model, blocks=tuple(blocks)), DEVICES))


@pytest.mark.parametrize(
    "more", [{"output_scale": True}, {"is_parallel": True}, {"multipliers": Multipliers(mixer_output=0.5)}], ids=str
)
def test_a_block_with_anything_else_is_not_split(tmp_path: Path, more: dict[str, Any]) -> None:
    """Whatever a block may have, its call on parts computes a plain one's and no more."""
    model = read_model_config(build_checkpoint(tmp_path, "llama2"))
    blocks = tuple(replace(block, **more) for block in model.blocks)

    assert not splits_residual(Partition(replace(model, blocks=blocks), DEVICES))
    assert not splits_residual(Partition(replace(model, norm_scales=False), DEVICES))
