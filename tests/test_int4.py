"""Kernels of 4 bits in groups: how they are made, their products, their memory, and what the model loses by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from loading import load
from test_quantization import surprise  # noqa: F401 - a fixture

from engine.mesh import DeviceMesh, one_device
from engine.models.linear import linear
from engine.models.weights.forms import Scaled
from engine.models.weights.int4 import Int4, group_size, quantize4
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.store import abstract_decoder, parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.step.backend import choose_backend

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 256}
XLA = WeightFormat(np.dtype(np.float32), activations=np.dtype(np.float32), bits=4)
MATRIX = WeightFormat(np.dtype(np.float32), Layout.MATRIX, scans=True, activations=np.dtype(np.float32), bits=4)


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


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 21), (128, 32), (384, 5)])
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
    product = jax.jit(linear)(jnp.asarray(x), kernel, nnx.Param(jnp.ones((3, outputs))))

    np.testing.assert_allclose(product, np.einsum("tn,nko->tko", x, held) + 1, atol=2e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The CPU's kernel gives a row the same bits alone and among any number of others."""
    form, rng = panels(), np.random.default_rng(0)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 3, 37), (300, 256)))
    kernel = nnx.Param(Int4.made_of(jnp.asarray(weight), kernel_of(256, 37), form, one_device()))

    whole = np.asarray(linear(jnp.asarray(x), kernel, None))

    for start, count in [(0, 1), (5, 2), (9, 24), (40, 150)]:
        part = np.asarray(linear(jnp.asarray(x[start : start + count]), kernel, None))
        np.testing.assert_array_equal(part, whole[start : start + count])


@pytest.mark.parametrize("form", [XLA, MATRIX], ids=["axes", "matrix"])
@pytest.mark.parametrize("devices", [1, 2])
def test_kernels_are_in_4_bits_and_tables_in_8(tmp_path, form: WeightFormat, devices: int) -> None:
    """Memory is what was foretold, and several devices have the numbers of one where groups are of one size."""
    directory = build_checkpoint(tmp_path, "qwen3", **SIZES)

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


def test_what_has_no_groups_stays_in_8_bits(tmp_path) -> None:
    """Inputs that none of the group sizes divides, and experts."""
    odd = load(build_checkpoint(tmp_path / "odd", "llama2"), XLA).layers[0]  # hidden 48, 80 columns
    experts = load(build_checkpoint(tmp_path / "experts", "mixtral", **SIZES), XLA).layers[0]

    assert isinstance(odd.mixer.qkv_kernel.get_value(), Scaled)
    assert isinstance(experts.mixer.qkv_kernel.get_value(), Int4)
    assert isinstance(experts.mlp.down_kernel.get_value(), Scaled)


@pytest.mark.thorough
def test_the_shipped_model_is_not_much_more_surprised(surprise) -> None:  # noqa: F811
    """Its perplexity over a fixed text in 4 bits, beside float32's."""
    exactly, rounded = surprise(), surprise(quantization="int4")

    assert 1 < np.exp(rounded.mean()) / np.exp(exactly.mean()) < 1.05
