"""Kernels of 4 bits in groups: how they are made, their products, their memory, and what the model loses by them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from loading import load
from test_quantization import surprise  # noqa: F401 - a fixture

from engine.devices.mesh import TP, DeviceMesh, one_device
from engine.models.linear import linear
from engine.models.tpu import experts_int4
from engine.models.weights.forms import InStack, Scaled
from engine.models.weights.int4 import Int4, Int4Experts, group_size, quantize4
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.store import abstract_decoder, parameter_bytes
from engine.models.weights.weight_format import Groups, Layout, WeightFormat
from engine.step.backend_choice import choose_backend
from engine.step.compilation import num_compilations

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 256}
XLA = WeightFormat(np.dtype(np.float32), activations=np.dtype(np.float32), bits=4)
MATRIX = WeightFormat(np.dtype(np.float32), Layout.MATRIX, scans=True, activations=np.dtype(np.float32), bits=4)

pairs_of = jax.jit(experts_int4.pairs_of, static_argnums=(1, 2))


def kernel_of(inputs: int, outputs: int) -> Parameter:
    """A declared kernel [inputs, 3, outputs]."""
    axes = (("hidden", inputs), ("group", 3), ("head_dim", outputs))
    return Parameter("kernel", Role.KERNEL, axes, tensors("kernel"), inputs=1)


def panels() -> WeightFormat:
    """The CPU's form; skips the test where there is no compiler."""
    if choose_backend(16, 32, np.dtype(np.float32)).layout is not Layout.PANELS:
        pytest.skip("no compiler")
    return WeightFormat(np.dtype(np.float32), Layout.PANELS, activations=np.dtype(np.float32), bits=4)


@pytest.mark.parametrize("group", [32, 128])
def test_each_group_has_16_steps(group: int) -> None:
    """No number is more than half a step off but for those that are cut off, and none is beyond the ends."""
    weight = np.random.default_rng(0).standard_normal((256, 5)).astype(np.float32)
    weight[:group, 2] = 0

    numbers, scales = map(np.asarray, quantize4(jnp.asarray(weight), group))

    assert numbers.min() == -8 and numbers.max() <= 7 and scales.shape == (256 // group, 5)
    each = scales.repeat(group, 0)
    is_cut = (numbers == 7) | (numbers == -8)
    assert (np.abs(numbers * each - weight) <= np.where(is_cut, 1.5001, 0.5001) * np.abs(each)).all()
    plain = np.abs(weight).reshape(-1, group, 5).max(axis=1).repeat(group, 0) / 7
    rounded = np.round(weight / np.where(plain == 0, 1, plain)) * plain
    assert np.square(numbers * each - weight).sum() < 0.9 * np.square(rounded - weight).sum()


@pytest.mark.parametrize("furthest", [-8, 7, 5])
def test_what_was_in_4_bits_is_what_it_was(furthest: int) -> None:
    """Numbers of a symmetric format with the same groups, whichever of them is furthest from 0."""
    rng = np.random.default_rng(0)
    ends = sorted((furthest, np.sign(furthest) * (1 - abs(furthest))))
    numbers = rng.integers(ends[0], ends[1] + 1, (96, 40))
    numbers[::32] = furthest
    weight = numbers * rng.random((3, 40)).astype(np.float32).repeat(32, 0)

    stored, scales = map(np.asarray, quantize4(jnp.asarray(weight, jnp.float32), 32))

    np.testing.assert_allclose(stored * scales.repeat(32, 0), weight, rtol=1e-6)


def test_scales_do_not_depend_on_the_order_of_a_groups_sum() -> None:
    """Where two scales are about as good, so that the last digits of their errors decide: devices that have parts of other
    shapes add in another order, and still make the same numbers."""
    rng = np.random.default_rng(0)
    weight, last = rng.standard_normal((128, 64)).astype(np.float32), 127

    def scales(ends: np.ndarray, order: np.ndarray) -> np.ndarray:
        weight[last] = ends
        return np.asarray(quantize4(jnp.asarray(weight[order]), 128)[1][0])

    straight = np.arange(128)
    low, high = np.full(64, -1.5, np.float32), np.full(64, 1.5, np.float32)
    of_low = scales(low, straight)
    for _ in range(32):  # to neighbours between which the choice changes
        middle = (low + high) / np.float32(2)
        is_low = scales(middle, straight) == of_low
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)

    for ends in (low, high):
        expected = scales(ends, straight)
        for _ in range(20):
            np.testing.assert_array_equal(scales(ends, rng.permutation(128)), expected)


@pytest.mark.parametrize("rows", [7, *(pytest.param(rows, marks=pytest.mark.thorough) for rows in (1, 40))])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(384, 5), *(pytest.param(*size, marks=pytest.mark.thorough) for size in ((64, 21), (128, 32)))],
)
@pytest.mark.parametrize("packed", [False, True])
def test_products_are_those_of_the_numbers_that_the_weights_stand_for(
    rows: int, inputs: int, outputs: int, packed: bool
) -> None:
    """With a bias, by XLA and by the CPU's own kernel, for widths that fill no panel."""
    form = panels() if packed else XLA
    rng = np.random.default_rng(rows)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((inputs, 3, outputs), (rows, inputs)))
    parameter = kernel_of(inputs, outputs)
    numbers, scales = map(np.asarray, quantize4(jnp.asarray(weight), group_size(parameter, 1)))
    held = numbers * scales.repeat(inputs // len(scales), 0)

    kernel = nnx.Param(Int4.made_of(jnp.asarray(weight), parameter, form, one_device()))
    product = jax.jit(linear)(jnp.asarray(x), kernel, nnx.Param(jnp.ones((3, outputs))), None)

    np.testing.assert_allclose(product, np.einsum("tn,nko->tko", x, held) + 1, atol=2e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The CPU's kernel gives a row the same bits alone and among any number of others."""
    form, rng = panels(), np.random.default_rng(0)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 3, 37), (300, 256)))
    kernel = nnx.Param(Int4.made_of(jnp.asarray(weight), kernel_of(256, 37), form, one_device()))

    whole = np.asarray(linear(jnp.asarray(x), kernel, None, None))

    for start, count in [(0, 1), (5, 2), (9, 24), (40, 150)]:
        part = np.asarray(linear(jnp.asarray(x[start : start + count]), kernel, None, None))
        np.testing.assert_array_equal(part, whole[start : start + count])


def experts_of(inputs: int, outputs: int, experts: int = 4) -> Parameter:
    """Declared kernels [experts, inputs, 2, outputs]."""
    axes = (("experts", experts), ("hidden", inputs), ("gate_up", 2), ("ffn", outputs))
    return Parameter("kernel", Role.EXPERTS, axes, tensors("kernel"), inputs=1)


def held_by(weight: np.ndarray, group: int) -> np.ndarray:
    """The numbers that the 4 bits of kernels [experts, inputs, ...] stand for."""
    numbers, scales = zip(*(quantize4(jnp.asarray(kernel), group) for kernel in weight), strict=True)
    return np.stack(numbers) * np.stack(scales).repeat(group, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 0, 2, 0),
        *(pytest.param(sizes, marks=pytest.mark.thorough) for sizes in ((0, 0, 0, 7), (0, 0, 0, 0), (1, 20, 30, 9))),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", Layout)
def test_each_row_is_multiplied_by_the_4_bits_of_its_expert(layout: Layout, sizes: tuple[int, ...]) -> None:
    """By XLA and by the CPU's own kernel; experts without rows, and rows behind all."""
    form = panels() if layout is Layout.PANELS else replace(XLA, layout=layout)
    rng, rows = np.random.default_rng(0), sum(sizes) + 2
    weight, x = rng.standard_normal((4, 192, 2, 19)).astype(np.float32), rng.standard_normal((rows, 192))
    flat = weight.reshape(4, 192, 38) if layout is Layout.MATRIX else weight
    experts = np.repeat(np.arange(4), sizes)
    groups = Groups(jnp.asarray(sizes, jnp.int32), jnp.asarray([*experts, 3, 3], jnp.int32))

    made = Int4Experts.made_of(jnp.asarray(flat), experts_of(192, 19), form, one_device())
    found = jax.jit(Int4Experts.grouped_product)(made, jnp.asarray(x, jnp.float32), groups)

    held = held_by(weight, 64).reshape(4, 192, 38)
    expected = [x[row] @ held[expert] for row, expert in enumerate(experts)]
    np.testing.assert_allclose(found[: len(experts)], np.reshape(expected, (-1, 38)), atol=2e-4)
    leaves = Int4Experts.leaves(experts_of(192, 19), form, 1)
    assert jax.tree.map(lambda leaf: leaf.shape, leaves) == jax.tree.map(lambda leaf: leaf.shape, made)


def test_a_layer_of_a_stack_is_multiplied_in_4_bits_as_if_it_were_alone() -> None:
    """Whichever of the layers it is."""
    rng, parameter = np.random.default_rng(0), experts_of(64, 9)
    layers, x = rng.standard_normal((3, 4, 64, 18)).astype(np.float32), rng.standard_normal((6, 64))
    groups = Groups(jnp.asarray([1, 0, 3, 2], jnp.int32), jnp.asarray([0, 2, 2, 2, 3, 3], jnp.int32))
    alone = [Int4Experts.made_of(jnp.asarray(layer), parameter, MATRIX, one_device()) for layer in layers]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)

    for place, weight in enumerate(alone):
        found = InStack(stack, jnp.int32(place)).grouped_product(jnp.asarray(x, jnp.float32), groups)

        expected = weight.grouped_product(jnp.asarray(x, jnp.float32), groups)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("form", [XLA, MATRIX])
def test_what_several_devices_make_is_compiled_once(form: WeightFormat) -> None:
    """Parameters of one shape are made by one function, so new weights compile nothing while a daemon serves."""
    mesh, rng = DeviceMesh(tuple(jax.devices()[:2])), np.random.default_rng(0)
    kernel = Parameter("kernel", Role.KERNEL, (("ffn", 128), ("hidden", 20)), tensors("kernel"), inputs=1)
    axes = (("experts", 4), ("ffn", 128), ("hidden", 20))
    experts = Parameter("kernel", Role.EXPERTS, axes, tensors("kernel"), inputs=1, whole="experts")

    def make() -> None:
        for kind, parameter in ((Int4, kernel), (Int4Experts, experts)):
            values = rng.standard_normal(parameter.sizes).astype(np.float32)
            placed = jax.device_put(values, mesh.sharding(*parameter.split))
            jax.block_until_ready(jax.tree.leaves(kind.made_of(placed, parameter, form, mesh)))

    make()
    before = num_compilations()
    make()

    assert num_compilations() == before


def test_devices_have_scales_of_their_own_inputs() -> None:
    """Two that split what experts read from add up to what the 4 bits stand for."""
    axes, mesh = (("experts", 4), ("ffn", 384), ("hidden", 20)), DeviceMesh(tuple(jax.devices()[:2]))
    parameter = Parameter("kernel", Role.EXPERTS, axes, tensors("kernel"), inputs=1, whole="experts")
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((4, 384, 20)).astype(np.float32), rng.standard_normal((7, 384)).astype(np.float32)
    of_row = np.repeat([0, 1, 3], [1, 4, 2])
    groups = Groups(jnp.asarray([1, 4, 0, 2], jnp.int32), jnp.asarray(of_row, jnp.int32))

    made = Int4Experts.made_of(mesh.laid(jnp.asarray(weight), None, TP), parameter, MATRIX, mesh)
    specs = jax.tree.map(lambda leaf: PartitionSpec(*leaf.split), Int4Experts.leaves(parameter, MATRIX, 2))
    product = mesh.on_each(
        lambda made, x: jax.lax.psum(made.grouped_product(x, groups), TP),
        (specs, PartitionSpec(None, TP)),
        PartitionSpec(),
    )

    assert made.group == 64 and made.scales.shape == (4, 2 * 8, 20)
    expected = np.einsum("ri,rio->ro", x, held_by(weight, 64)[of_row])
    np.testing.assert_allclose(jax.jit(product)(made, x), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "behind", "inputs", "outputs", "group"),
    [
        ((3, 0, 1, 40, 0, 31, 1), 7, 128, 150, 64),  # tiles that several share, and one that fills two
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ((0, 0, 0), 5, 64, 32, 64),
                ((150, 0, 1, 300), 0, 192, 40, 64),
                ((0, 2), 0, 128, 300, 128),
            )
        ),
    ],
)
def test_the_tpu_s_kernel_is_its_plain_twin(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], behind: int, inputs: int, outputs: int, group: int
) -> None:
    """In Pallas' interpreter, for the second of two layers, in blocks of columns; filled up scales are not read."""
    monkeypatch.setattr(experts_int4, "WIDENED_NUMBERS", 128 * inputs)
    rng, experts = np.random.default_rng(0), len(sizes)
    x = rng.standard_normal((sum(sizes) + behind, inputs)).astype(np.float32)
    x[len(x) - behind :] = np.nan
    numbers, scales = rng.integers(-8, 8, (2 * experts, inputs, outputs)), rng.random((2 * experts, 8, outputs))
    held = (numbers * scales[:, : inputs // group].repeat(group, 1))[experts:]
    scales[:, inputs // group :] = np.nan
    arguments = (
        *map(jnp.asarray, (x, numbers.astype(jnp.int4), scales.astype(np.float32), np.asarray(sizes, np.int32))),
        jnp.int32(experts),
    )

    kernel = jax.jit(partial(experts_int4.grouped_product, group=group, interpret=True))
    found = np.asarray(kernel(*arguments))[: sum(sizes)]

    of_row = np.repeat(np.arange(experts), sizes)
    np.testing.assert_allclose(found, np.einsum("ri,rio->ro", x[: len(of_row)], held[of_row]), atol=1e-3)


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.sampled_from([8, 32]))
def test_a_pair_is_each_expert_with_each_tile_of_its_rows(sizes: list[int], tile: int) -> None:
    """In order of the tiles, as a tile's results stay in the kernel's memory from pair to pair."""
    rows, ends = 6 * 50, np.cumsum(sizes)
    expected = [
        (expert, number, end - size, end)
        for expert, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for number in range((end - size) // tile, -(-end // tile))
        if size
    ]

    pairs = pairs_of(jnp.asarray(sizes, jnp.int32), rows, tile)

    found = np.stack([pairs.experts, pairs.tiles, pairs.begins, pairs.ends], axis=1)[: len(expected)].tolist()
    assert found == [list(map(int, pair)) for pair in expected]
    assert int(pairs.number) == max(1, len(expected)) <= len(pairs.tiles)
    assert (np.asarray(pairs.tiles) < -(-rows // tile)).all()


@pytest.mark.parametrize(
    ("variant", "devices", "form"),
    [
        ("mixtral", 2, MATRIX),
        *(
            pytest.param(variant, devices, form, marks=pytest.mark.thorough)
            for variant in ("mixtral", "qwen3")
            for devices in (1, 2)
            for form in (XLA, MATRIX)
            if (variant, devices, form) != ("mixtral", 2, MATRIX)
        ),
    ],
)
def test_kernels_are_in_4_bits_and_tables_in_8(tmp_path, variant: str, form: WeightFormat, devices: int) -> None:
    """Memory is what was foretold, experts' and others', and on several devices."""
    directory = build_checkpoint(tmp_path, variant, **SIZES)

    decoder = load(directory, form, devices)

    forms = {type(leaf.get_value()) for _, leaf in nnx.to_flat_state(nnx.state(decoder))}
    assert Int4 in forms and isinstance(decoder.embedding.get_value(), Scaled)
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    shapes = jax.tree.leaves(nnx.state(abstract_decoder(decoder.partition, form, mesh=mesh)))
    for array, shape in zip(jax.tree.leaves(nnx.state(decoder)), shapes, strict=True):
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)
    halves = [leaf.size // 2 if leaf.dtype == jnp.int4 else leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder))]
    whole = parameter_bytes(decoder.partition, form) * devices
    assert sum(halves) <= whole < 1.1 * sum(halves)  # what is not split is on each of them


@pytest.mark.thorough
def test_what_has_no_groups_stays_in_8_bits(tmp_path) -> None:
    """Inputs that none of the group sizes divides; and of experts on a TPU, whose tiles have 64 of them."""
    odd = load(build_checkpoint(tmp_path / "odd", "llama2"), XLA).layers[0]  # hidden 48, 80 columns
    narrow = build_checkpoint(tmp_path / "experts", "mixtral", **{**SIZES, "intermediate_size": 96})
    on_tpu, elsewhere = (load(narrow, form).layers[0] for form in (MATRIX, XLA))

    assert isinstance(odd.mixer.qkv_kernel.get_value(), Scaled)
    assert isinstance(elsewhere.mlp.down_kernel.get_value(), Int4Experts)
    (block,) = on_tpu.blocks
    assert isinstance(block.mlp.gate_up_kernel.get_value(), Int4Experts)
    assert isinstance(block.mlp.down_kernel.get_value(), Scaled)


@pytest.mark.thorough
def test_experts_stay_in_8_bits_where_their_kernel_is_at_fault(tmp_path) -> None:
    """All of them, and nothing else."""
    form = replace(MATRIX, least_expert_bits=8)

    (block,) = load(build_checkpoint(tmp_path, "mixtral", **SIZES), form).layers[0].blocks

    assert isinstance(block.mixer.qkv_kernel.get_value(), Int4)
    assert isinstance(block.mlp.gate_up_kernel.get_value(), Scaled)


@pytest.mark.thorough
def test_the_shipped_model_is_not_much_more_surprised(surprise) -> None:  # noqa: F811
    """Its perplexity over a fixed text in 4 bits, beside float32's."""
    exactly, rounded = surprise(), surprise(quantization="int4")

    assert 1 < np.exp(rounded.mean()) / np.exp(exactly.mean()) < 1.05
