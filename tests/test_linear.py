"""Products over packed weights: the same numbers as over plain ones, and the same for a row in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels_needed import kernels_needed

from engine.devices.mesh import one_device
from engine.models.linear import linear, look_up
from engine.models.weights.forms import Dense
from engine.models.weights.panels import panel_width
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.weight_format import Layout, WeightFormat

with kernels_needed():
    WIDTH = panel_width()


def build_kernel(depth, *out, dtype=np.float32):
    """Random numbers [depth, *out]."""
    rng = np.random.default_rng(depth)
    return jnp.asarray(rng.standard_normal((depth, *out), np.float32)).astype(dtype)


def as_param(numbers, layout, role=Role.KERNEL):
    """Numbers as a kernel or table is served in a layout."""
    names = ("hidden", "group", "head_dim", "gate_up") if role is Role.KERNEL else ("vocabulary", "hidden")
    axes = tuple(zip(names, numbers.shape, strict=False))
    parameter = Parameter("", role, axes, tensors(""), inputs=1 if role is Role.KERNEL else 0)
    weight = Dense.made_of(numbers, parameter, WeightFormat(np.dtype(numbers.dtype), layout), one_device())
    return nnx.Param(weight, declared=parameter)


def pack(numbers):
    """A kernel in panels."""
    return as_param(numbers, Layout.PANELS)


def build_rows(count, depth):
    """Random activations [count, depth]."""
    return jnp.asarray(np.random.default_rng(count).standard_normal((count, depth), np.float32))


@pytest.mark.parametrize(
    "rows", [1, 13, 1025, *(pytest.param(rows, marks=pytest.mark.thorough) for rows in (2, 5, 12, 64))]
)
@pytest.mark.parametrize("out", [(WIDTH,), (3, WIDTH), (100,), (2, 3, 7), (1,)])
def test_a_packed_kernel_gives_what_the_plain_one_gives(rows, out):
    """Any number of rows and columns, the last panel not full, over more rows than are done at once; with a bias."""
    kernel, x = build_kernel(70, *out), build_rows(rows, 70)
    bias = nnx.Param(jnp.arange(np.prod(out), dtype=np.float32).reshape(out))

    actual = jax.jit(linear)(x, pack(kernel), bias, None)

    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).reshape(70, -1)
    np.testing.assert_allclose(actual, expected.reshape(rows, *out) + np.asarray(bias[...]), atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_more_inputs_than_are_multiplied_at_once(dtype):
    """A panel that comes in pieces, not all of one size, gives what the plain kernel gives, over few rows and many."""
    kernel, x = build_kernel(2501, 2 * WIDTH, dtype=dtype), build_rows(40, 2501)

    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)

    for rows in (1, 5, 9, 40):
        product = jax.jit(linear)(x[:rows], pack(kernel), None, None)
        np.testing.assert_allclose(product, expected[:rows], atol=1e-3)


@pytest.mark.parametrize("depth", [300, 2501])
def test_a_row_is_the_same_to_the_bit_in_any_batch(depth):
    """What a row gets does not depend on how many there are beside it."""
    kernel, x = pack(build_kernel(depth, 100)), build_rows(600, depth)
    product = jax.jit(linear)

    whole = np.asarray(product(x, kernel, None, None))

    for count in (1, 2, 11, 12, 13, 25):
        np.testing.assert_array_equal(product(x[:count], kernel, None, None), whole[:count])


def test_rows_of_zeros_at_the_end_are_not_multiplied():
    """Padding costs nothing, so not even a weight that is no number makes it one; zeros before a row with numbers do count."""
    kernel = build_kernel(70, 3, WIDTH).at[0].set(np.nan)
    x = build_rows(9, 70).at[jnp.array([1, 7, 8])].set(0)

    product = np.asarray(jax.jit(linear)(x, pack(kernel), None, None))

    assert np.isnan(product[:7]).all() and not product[7:].any()


def test_a_packed_table_is_looked_up_and_makes_logits():
    """The one packed form of a tied embedding serves both of its uses."""
    table = build_kernel(101, 48)
    packed, plain = (as_param(table, layout, Role.TABLE) for layout in (Layout.PANELS, Layout.AXES))
    ids, hidden = jnp.asarray([0, 5, 31, 32, 100], jnp.int32), build_rows(5, 48)

    np.testing.assert_array_equal(jax.jit(look_up)(packed, ids), np.asarray(table)[np.asarray(ids)])
    expected = plain.get_value().logits(hidden)
    np.testing.assert_allclose(jax.jit(Dense.logits)(packed.get_value(), hidden), expected, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9, 100])
def test_bfloat16_weights_are_multiplied_as_float32(rows):
    """Packed in half the bytes, they give to the bit what the same numbers give in float32."""
    kernel, x = build_kernel(64, 99, dtype=jnp.bfloat16), build_rows(rows, 64)
    wide = kernel.astype(np.float32)

    narrow = jax.jit(linear)(x, pack(kernel), None, None)

    assert pack(kernel).get_value().values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, jax.jit(linear)(x, pack(wide), None, None))
