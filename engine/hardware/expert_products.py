"""The grouped product of experts as a step runs it, against a plain twin, and the time it takes."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.hardware.measurement import Measurement, attempted, seconds
from engine.models.weights.forms import Dense, Experts, InStack, Scaled
from engine.models.weights.int4 import Int4Experts
from engine.models.weights.weight_format import INT4, Groups, Layout, Leaf

SECTION = "experts"
ON_ACCELERATORS, ON_CPUS = (4, 32, 2048, 1536), (2, 4, 64, 96)
"""Layers, experts, inputs and columns: an eighth of Qwen3-30B-A3B's, or less."""
GROUP = 64
"""Inputs that share a scale in 4 bits."""
SIZES = (3, 0, 1, 4)
"""Rows of the first experts; the others have none."""
ROWS = 16
"""Half of them behind all groups."""
TOLERANCE = 2**-6
"""Of the largest number: a TPU rounds float32 factors to bfloat16."""


def measure_experts(bandwidth: float) -> Iterator[Measurement]:
    """Errors, and times beside those of a ``bandwidth`` in bytes a second."""
    shape = ON_CPUS if jax.default_backend() == "cpu" else ON_ACCELERATORS
    for name, dtype in (("bfloat16", jnp.bfloat16), ("int8", jnp.int8), ("int4", jnp.int4)):
        yield from attempted(SECTION, partial(_measure, name, _weight(shape, np.dtype(dtype)), bandwidth))


def _weight(shape: tuple[int, ...], dtype: np.dtype) -> Experts:
    """Random kernels [layers, experts, inputs, columns], which scales halve if there are any."""
    layers, experts, inputs, columns = shape
    least, most = (-8, 7) if dtype == INT4 else (-127, 127)
    numbers = jax.random.randint(jax.random.key(0), shape, least, most + 1, jnp.int8)
    if dtype == INT4:
        scales = jnp.full((layers, experts, inputs // GROUP, columns), 0.5, jnp.bfloat16)
        return Int4Experts(numbers.astype(dtype), scales, Layout.MATRIX, (columns,), GROUP)
    if dtype != np.int8:
        return Dense(numbers.astype(dtype), Layout.MATRIX, (columns,))
    scales = jnp.full((layers, experts, columns), np.float32(0.5))
    return Scaled(numbers, scales, Layout.MATRIX, (columns,), np.dtype(jnp.bfloat16))


def _measure(name: str, weight: Experts, bandwidth: float) -> Iterator[Measurement]:
    layers, experts, inputs, columns = weight.values.shape
    rows = jax.random.normal(jax.random.key(1), (ROWS, inputs)).astype(jnp.bfloat16)
    sizes = jnp.zeros(experts, jnp.int32).at[: len(SIZES)].set(jnp.asarray(SIZES, jnp.int32))
    of_row = np.repeat(np.arange(len(SIZES)), SIZES)
    groups = Groups(sizes, jnp.zeros(ROWS, jnp.int32).at[: len(of_row)].set(jnp.asarray(of_row, jnp.int32)))
    place = layers - 1

    @jax.jit
    def product(weight: Experts, rows: Array) -> Array:
        return InStack(weight, jnp.int32(place)).grouped_product(rows, groups)

    found = np.asarray(product(weight, rows))[: len(of_row)]
    scale = 1.0 if isinstance(weight, Dense) else 0.5
    kernels = np.asarray(weight.values[place, : len(SIZES)], np.float64)
    wanted = np.einsum("ri,rio->ro", np.asarray(rows[: len(of_row)], np.float64), kernels[of_row]) * scale
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    state = "good" if error <= TOLERANCE else "bad"
    yield Measurement(section=SECTION, what=f"error, {name}", value=error, expected=TOLERANCE, state=state)
    awake = sum(size > 0 for size in SIZES)
    read = awake * Leaf((inputs, columns), weight.values.dtype).nbytes(devices=1)
    yield Measurement(
        section=SECTION,
        what=f"{awake} of {layers} x {experts} experts, {name}",
        value=1e6 * seconds(product, weight, rows),
        unit="us",
        expected=1e6 * read / bandwidth,
        note="a product, beside the time to read these experts",
    )
