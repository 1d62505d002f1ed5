"""What a CPU's kernels compute between products: the same as numpy, and the same for a row in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_needed import kernels_needed

from engine.models.cpu.rows import CPU_ROWS, GATED, prepare
from engine.models.layers.activation import Activation
from engine.models.layers.row_operations import XLA_ROWS

with kernels_needed():
    prepare()

shapes = pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 70), (300, 259), (2, 20_000)])
"""Of a part of a vector, of several tasks, and of one row in a task."""


def numbers(*shape: int) -> np.ndarray:
    """Random ones, some of them large."""
    random = np.random.default_rng(shape[0])
    return (random.standard_normal(shape) * random.choice([1, 30], shape)).astype(np.float32)


@pytest.mark.parametrize("centered", [False, True])
@shapes
def test_a_row_is_divided_by_its_root_mean_square(rows: int, width: int, centered: bool) -> None:
    """After its mean is subtracted, if so, and times the scales."""
    x, scale = numbers(rows, width) + 3, numbers(width)

    found = jax.jit(lambda x, scale: CPU_ROWS.normed(x, scale, 1e-5, centered=centered))(x, scale)

    wide = x.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True) * centered
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", GATED)
@shapes
def test_a_gate_multiplies_what_goes_up(rows: int, width: int, activation: Activation) -> None:
    """Through its activation."""
    gate_up = numbers(rows, 2, width)

    found = jax.jit(lambda both: CPU_ROWS.gated(both, activation))(gate_up)

    gate, up = gate_up.astype(np.float64).swapaxes(0, 1)
    if activation is Activation.SILU:
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        expected = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@shapes
def test_two_rows_are_added(rows: int, width: int, scale: float) -> None:
    """Each product and sum rounded once."""
    x, y = numbers(rows, width), numbers(rows, width)[::-1]

    found = jax.jit(lambda x, y: CPU_ROWS.added(x, y, scale))(x, y)

    np.testing.assert_array_equal(found, x + np.float32(scale) * y)


def test_a_row_is_the_same_in_any_batch() -> None:
    """To the bit, wherever it begins."""
    x, scale = numbers(301, 2, 259), numbers(259)
    alone, among = x[-1:], jnp.asarray(x)

    @jax.jit
    def computed(x: jax.Array) -> list[jax.Array]:
        norms = [CPU_ROWS.normed(x[:, 0], jnp.asarray(scale), 1e-5, centered=centered) for centered in (False, True)]
        return [*norms, *(CPU_ROWS.gated(x, activation) for activation in GATED)]

    for one, many in zip(computed(alone), computed(among), strict=True):
        np.testing.assert_array_equal(one[0], many[-1])


@pytest.mark.parametrize("activation", Activation)
def test_gates_of_any_size_are_finite_and_of_every_activation(activation: Activation) -> None:
    """As XLA has them, whose own are those without a kernel."""
    sizes = np.array([0, 1e-30, 1, 20, 86, 87, 88, 89, 100, 1e4, 1e18], np.float32)
    gate = np.concatenate([sizes, -sizes])
    gate_up = jnp.stack([gate, np.ones_like(gate)])[None]

    found, expected = (
        jax.jit(lambda x, rows=rows: rows.gated(x, activation))(gate_up) for rows in (CPU_ROWS, XLA_ROWS)
    )

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_results_have_the_dtype_of_their_rows() -> None:
    """Below float32 too."""
    x, scale = jnp.ones((3, 2, 70), jnp.bfloat16), jnp.ones(70)
    found = [
        CPU_ROWS.normed(x, scale, 1e-5, centered=False), CPU_ROWS.added(x, x, 1.0), CPU_ROWS.gated(x, Activation.SILU),
    ]  # fmt: skip
    assert {array.dtype for array in found} == {np.dtype(jnp.bfloat16)}


def test_padding_stays_zeros() -> None:
    """By which products know it."""
    x = jnp.zeros((3, 2, 70))
    normed = [CPU_ROWS.normed(x, jnp.ones(70), 1e-5, centered=centered) for centered in (False, True)]
    assert not np.any([*normed, CPU_ROWS.added(x, x, 1.0)])
    assert not np.any([CPU_ROWS.gated(x, activation) for activation in GATED])
