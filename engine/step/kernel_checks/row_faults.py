"""What is wrong with what a CPU computes between products: norms, gates and additions."""

import jax
import numpy as np

from engine.models.cpu import rows as cpu_rows
from engine.models.cpu.rows import CPU_ROWS
from engine.models.layers.activation import Activation
from engine.step.kernel_checks.tolerance import difference


def rows_fault() -> str | None:
    """Of what a CPU computes between products, for rows that fill no whole vectors. Raises
    KernelsUnavailable."""
    cpu_rows.prepare()
    x, y, scale = np.random.default_rng(0).standard_normal((3, 83)).astype(np.float32)
    apart, logistic = x - x.mean(), 1 / (1 + np.exp(-x))
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    expected = {
        "norm": x / np.sqrt((x**2).mean() + 1e-5) * scale,
        "centered norm": apart / np.sqrt((apart**2).mean() + 1e-5) * scale,
        "silu": x * logistic * y,
        "gelu": x / 2 * (1 + tanh) * y,
        "addition": x + y / 2,
    }

    def computed(x: jax.Array, y: jax.Array, scale: jax.Array, both: jax.Array) -> list[jax.Array]:
        norms = [CPU_ROWS.normed(x, scale, 1e-5, centered=centered) for centered in (False, True)]
        gated = [CPU_ROWS.gated(both, activation) for activation in (Activation.SILU, Activation.GELU_TANH)]
        return [*norms, *gated, CPU_ROWS.added(x, y, 0.5)]

    # loops of XLA's would have to be compiled
    return difference(expected, jax.jit(computed)(x, y, scale, np.stack([x, y])))
