"""What is wrong with the matrix products of a CPU, and with those of experts in 4 bits of a TPU."""

import jax
import jax.numpy as jnp
import numpy as np

from engine.models.weights import panels
from engine.models.weights.forms import InStack
from engine.models.weights.int4 import Int4Experts
from engine.models.weights.weight_format import Groups, Layout
from engine.step.kernel_checks.tolerance import EXACT


def product_fault() -> str | None:
    """Of the CPU's matrix products, with weights of each form, for one row and for several.

    Raises KernelsUnavailable.
    """
    depth, out = 96, 2 * panels.panel_width() + 3
    random = np.random.default_rng(0)
    x = random.standard_normal((9, depth)).astype(np.float32) / np.float32(depth**0.5)
    whole, ones = random.standard_normal((out, depth)), np.ones(out)
    scales = np.linspace(0.5, 2, out).astype(np.float32) / 8
    eighths = np.round(8 * whole).clip(-127, 127).astype(np.int8)
    halves, in_groups = np.round(2 * whole).clip(-8, 7).astype(np.int8), np.repeat(2 * scales[:, None], 3, axis=1)
    none = np.zeros(0, np.float32)
    weights = {
        "float32": (whole, ones, panels.as_panels(whole.astype(np.float32)), none),
        "bfloat16": (whole.astype(jnp.bfloat16), ones, panels.as_panels(whole.astype(jnp.bfloat16)), none),
        "int8": (eighths, scales, panels.as_panels(eighths), scales),
        "4 bits": (halves, 2 * scales, panels.as_panels4(halves), panels.as_panels(in_groups)),
    }
    found = jax.jit(lambda x, packed: [_products(x, kernel, out, by) for kernel, by in packed])(
        x, [(kernel, by) for _, _, kernel, by in weights.values()]
    )
    for (name, (weight, scale, _, _)), results in zip(weights.items(), found, strict=True):
        expected = x.astype(np.float64) @ weight.astype(np.float64).T * scale
        error = np.max([np.abs(np.asarray(result) - expected[: len(result)]).max() for result in results])  # NaN of any
        if not error <= EXACT:
            return f"products with {name} differ from numpy's by {error:.3g}, more than {EXACT:g}"
    return None


def _products(x: jax.Array, kernel: jax.Array, out: int, scales: jax.Array) -> tuple[jax.Array, ...]:
    """f32[rows, out] of all rows, of the first alone, and of all with a kernel before this one."""
    sizes, kernels = jnp.asarray([0, len(x)], np.int32), jnp.stack([jnp.zeros_like(kernel), kernel])
    grouped = panels.grouped_product(x, kernels, sizes, out, jnp.stack([scales, scales]))
    return panels.product(x, kernel, out, scales), panels.product(x[:1], kernel, out, scales), grouped


def experts_fault() -> str | None:
    """Of the TPU's product of experts in 4 bits, in the second of two layers."""
    random, inputs, columns, group = np.random.default_rng(0), 192, 256, 64
    numbers = random.integers(-8, 8, (2, 3, inputs, columns))
    scales = random.integers(1, 5, (2, 3, 8, columns)) / 16
    x = (random.integers(-8, 9, (9, inputs)) / 64).astype(jnp.bfloat16)
    weight = Int4Experts(
        jnp.asarray(numbers).astype(jnp.int4), jnp.asarray(scales, x.dtype), Layout.MATRIX, (columns,), group
    )
    of_row = np.repeat([0, 2], [4, 3])
    groups = Groups(jnp.asarray([4, 0, 3], jnp.int32), jnp.asarray([*of_row, 2, 2], jnp.int32))
    product = jax.jit(lambda weight, x: InStack(weight, jnp.int32(1)).grouped_product(x, groups))
    kernels = numbers[1] * scales[1, :, : inputs // group].repeat(group, 1)
    expected = np.einsum("ri,rio->ro", x[: len(of_row)].astype(np.float64), kernels[of_row])
    error = np.abs(np.asarray(product(weight, jnp.asarray(x)))[: len(of_row)] - expected).max()
    return None if error <= EXACT else f"products differ from numpy's by {error:.3g}, more than {EXACT:g}"
