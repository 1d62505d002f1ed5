"""Products of each row with the kernel of its expert: the numbers of a plain twin, and the bits of a product alone."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_needed import kernels_needed

from caching import instruction_set
from engine.models.weights import panels

ROOT = Path(__file__).parent.parent
FORMS = ["float32", "bfloat16", "int8", "int4 32", "int4 64", "int4 128"]

with kernels_needed():
    WIDTH = panels.panel_width()

grouped = jax.jit(panels.grouped_product, static_argnums=3)
product = jax.jit(panels.product, static_argnums=2)


@dataclass(frozen=True)
class Kernels:
    """The kernels of several experts."""

    numbers: np.ndarray
    """What they are: f64[experts, out, depth]."""
    panels: jax.Array
    scales: jax.Array


def build_kernels(experts, out, depth, form):
    """Random numbers in one of FORMS; the number behind int4 is that of the inputs in a group."""
    rng = np.random.default_rng([experts, out, depth])
    numbers, none = rng.standard_normal((experts, out, depth), np.float32), np.zeros(0, np.float32)
    if form == "int8":
        whole = np.round(40 * numbers).clip(-127, 127).astype(np.int8)
        scales = rng.uniform(0.01, 0.04, (experts, out)).astype(np.float32)
        return Kernels(whole * scales.astype(np.float64)[..., None], panels.as_panels(whole), scales)
    if form.startswith("int4"):
        whole, group = np.round(3 * numbers).clip(-8, 7).astype(np.int8), int(form.split()[1])
        scales = rng.uniform(0.1, 0.4, (experts, out, -(-depth // group))).astype(np.float32)
        of_each = np.repeat(scales.astype(np.float64), group, axis=2)[..., :depth]
        return Kernels(whole * of_each, panels.as_panels4(whole), panels.as_panels(scales))
    numbers = numbers.astype(jnp.dtype(form))
    return Kernels(numbers.astype(np.float64), panels.as_panels(numbers), none)


def scales_of(kernels, expert):
    """Those of one expert, if there are any."""
    return kernels.scales[expert] if kernels.scales.size else kernels.scales


def build_rows(count, depth):
    """Random activations f32[count, depth], whose products are about 1."""
    return np.random.default_rng(count).standard_normal((count, depth), np.float32) / np.float32(depth**0.5)


def twin(x, sizes, kernels):
    """What the grouped product is: f64[rows, out], expert after expert."""
    expected, end = np.zeros((len(x), kernels.numbers.shape[1])), np.cumsum(sizes)
    for expert, numbers in enumerate(kernels.numbers):
        rows = slice(end[expert] - sizes[expert], end[expert])
        expected[rows] = x[rows].astype(np.float64) @ numbers.T
    return expected


def assert_is_the_twin(sizes, behind, out, depth, form):
    """For ``sizes`` rows of the experts, and so many ``behind`` them."""
    kernels = build_kernels(len(sizes), out, depth, form)
    x, sizes = build_rows(sum(sizes) + behind, depth), np.asarray(sizes, np.int32)

    actual = grouped(x, kernels.panels, sizes, out, kernels.scales)

    np.testing.assert_allclose(actual, twin(x, sizes, kernels), atol=1e-5)
    assert not np.asarray(actual)[len(x) - behind :].any()


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(1, 6 * WIDTH),
    st.integers(1, 140),
    st.sampled_from(FORMS),
)
def test_each_row_is_multiplied_by_the_kernel_of_its_expert(sizes, behind, out, depth, form):
    """Experts with no rows, few and many; odd sizes; rows behind all are zero."""
    assert_is_the_twin(sizes, behind, out, depth, form)


@pytest.mark.parametrize("form", FORMS[:4])
@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 0, 1], [600, 0, 0], [0, 300, 301]])
def test_all_rows_may_have_one_expert_or_none(sizes, form):
    """Also more rows than are multiplied at once."""
    assert_is_the_twin(sizes, 2, WIDTH + 3, 500, form)


@pytest.mark.parametrize("form", FORMS[:4])
def test_a_row_is_the_same_to_the_bit_whoever_shares_its_expert(form):
    """As in the product with one kernel, which gives the same bits."""
    sizes, kernels = np.asarray([1, 0, 5, 30, 13, 2], np.int32), build_kernels(6, 300, 300, form)
    x = build_rows(sizes.sum(), 300)

    together = np.asarray(grouped(x, kernels.panels, sizes, 300, kernels.scales))

    for row, expert in enumerate(np.repeat(np.arange(6), sizes)):
        alone = grouped(x[row : row + 1], kernels.panels, np.eye(6, dtype=np.int32)[expert], 300, kernels.scales)
        np.testing.assert_array_equal(alone[0], together[row])
        np.testing.assert_array_equal(
            product(x[row], kernels.panels[expert], 300, scales_of(kernels, expert)), together[row]
        )


@pytest.mark.parametrize("sizes", [[9, 0, 0], [1, 9, 2], [-3, 4, 0], [2**31 - 1, 2**31 - 1, 1]])
def test_wrong_sizes_reach_no_row_that_is_not_there(sizes):
    """Sizes of more rows than there are end with the last; negative ones are none."""
    kernels, x = build_kernels(3, 5, 8, "float32"), build_rows(4, 8)
    ends = np.minimum(np.cumsum([min(max(size, 0), 4) for size in sizes]), 4)

    actual = grouped(x, kernels.panels, np.asarray(sizes, np.int32), 5, kernels.scales)

    np.testing.assert_allclose(actual, twin(x, np.diff(ends, prepend=0), kernels), atol=1e-5)


def test_all_numbers_of_4_bits_are_read():
    """-8 to 7, in the lower half of a byte and in the upper one."""
    numbers = np.resize(np.arange(-8, 8, dtype=np.int8), (2 * WIDTH, 1))

    actual = product(
        np.ones((1, 1)),
        panels.as_panels4(numbers),
        len(numbers),
        panels.as_panels(np.ones(numbers.shape, np.float32)),
    )

    np.testing.assert_array_equal(actual[0], numbers[:, 0])


@pytest.mark.parametrize("form", FORMS[2:4])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1.0, 1e36])
def test_integers_are_multiplied_as_exactly_as_float32_whatever_the_activations(form, size):
    """One input is a hundred times the others, as models have them; rows of other sizes, and of none, are beside it."""
    kernels, x = build_kernels(1, 40, 300, form), 0.1 * build_rows(7, 300)
    x[:, 17] = [0, 1, -1, 0.9922, 0.9921, -0.9922, 0.5]
    x[1:] *= np.float32(size)

    actual = product(x, kernels.panels[0], 40, scales_of(kernels, 0))

    reach = np.abs(x).max(axis=1, keepdims=True) * np.abs(kernels.numbers[0]).sum(axis=1)
    assert (np.abs(actual - twin(x, [7], kernels)) <= 2.0**-22 * reach + 1e-35).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_number_stays_so_and_spoils_no_other(form, wrong):
    """Each of its outputs, whatever a weight is; the rows beside it have the bits that they have without it."""
    kernels, x = build_kernels(1, 40, 70, form), build_rows(9, 70)
    spoilt = x.copy()
    spoilt[4, 69] = wrong

    right, found = (np.asarray(product(rows, kernels.panels[0], 40, scales_of(kernels, 0))) for rows in (x, spoilt))

    np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(right, 4, axis=0))
    assert not np.isfinite(found[4]).any()


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("size", [1 - 2**-8, 0x7F7F7F / 2**23], ids=["the next power of two's", "digits of 127"])
def test_sums_of_very_many_integers_do_not_overflow(form, size):
    """More inputs than 32 bits hold the sums of, all the largest, and all in one group."""
    depth, largest = 140_000, 127 if form == "int8" else 7
    numbers, x = np.full((WIDTH + 1, depth), largest, np.int8), np.full((1, depth), size, np.float32)
    ones = np.ones((WIDTH + 1, 1), np.float32)
    packed = panels.as_panels(numbers) if form == "int8" else panels.as_panels4(numbers)

    actual = product(x, packed, WIDTH + 1, ones[:, 0] if form == "int8" else panels.as_panels(ones))

    is_exact = panels.inputs_together(8 if form == "int8" else 4) > 1  # or else they are added up as float32
    rtol = 1e-3 if is_exact else 0.01
    np.testing.assert_allclose(actual, np.full((1, WIDTH + 1), depth * largest * size), rtol=rtol)


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.thorough if isa == "avx2" else pytest.mark.exhaustive)
        for isa in instruction_set.available()[:-1]
    ],
)
def test_it_is_so_with_fewer_instructions(isa):
    """This file but for this test, which would start itself again, in a process that is held to them."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not fewer_instructions", __file__]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), instruction_set.VARIABLE: isa}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
