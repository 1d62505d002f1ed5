"""A CPU's RowOperations, by C++ kernels of our own, which the threads of our products work on."""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import ROWS
from engine.models.layers.activation import Activation
from engine.models.layers.row_operations import XLA_ROWS

GATED = {Activation.SILU: "odriver_gated_silu", Activation.GELU_TANH: "odriver_gated_gelu_tanh"}
"""The kernels of activations; the other ones are XLA's."""


@cache
def prepare() -> None:
    """Registers the kernels. Raises KernelsUnavailable."""
    for name in ("odriver_norm", "odriver_added", *GATED.values()):
        register(load(ROWS), name)


class CPURows:
    """XLA's, but for how sums are rounded and exponentials found. A row's result is the same to the bit
    whatever the other rows are."""

    def normed(self, x: Array, scale: Array, eps: float, *, centered: bool) -> Array:
        """See RowOperations."""
        call = jax.ffi.ffi_call("odriver_norm", jax.ShapeDtypeStruct(x.shape, np.float32))
        normed: Array = call(x.astype(np.float32), scale, eps=np.float32(eps), centered=np.int64(centered))
        return normed.astype(x.dtype)

    def gated(self, gate_up: Array, activation: Activation) -> Array:
        """See RowOperations."""
        if activation not in GATED:
            return XLA_ROWS.gated(gate_up, activation)
        shape = *gate_up.shape[:-2], gate_up.shape[-1]
        call = jax.ffi.ffi_call(GATED[activation], jax.ShapeDtypeStruct(shape, np.float32))
        gated: Array = call(gate_up.astype(np.float32))
        return gated.astype(gate_up.dtype)

    def added(self, x: Array, y: Array, scale: float) -> Array:
        """See RowOperations."""
        call = jax.ffi.ffi_call("odriver_added", jax.ShapeDtypeStruct(x.shape, np.float32), input_output_aliases={0: 0})
        added: Array = call(x.astype(np.float32), y.astype(np.float32), scale=np.float32(scale))
        return added.astype(x.dtype)


CPU_ROWS = CPURows()
