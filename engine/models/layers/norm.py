"""The norms of decoders."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.layers.row_operations import XLA_ROWS, RowOperations
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import TensorRule


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), f[..., hidden], computed in float32.

    If ``centered``, the mean is subtracted first (Ba et al. 2016). ``bias`` is the rule of one that
    is added last.
    """

    def __init__(
        self,
        name: str,
        axes: Axes,
        eps: float,
        rule: TensorRule,
        make: ParameterFactory,
        *,
        centered: bool = False,
        bias: TensorRule | None = None,
    ) -> None:
        self.scale = make.scale(f"{name}.scale", axes, rule)
        self.bias = None if bias is None else make.bias(f"{name}.bias", axes, bias, exact=True)
        self.eps, self.centered = eps, centered

    def __call__(self, x: Array, rows: RowOperations = XLA_ROWS) -> Array:
        if self.bias is None:
            return rows.normed(x, self.scale[...], self.eps, centered=self.centered)
        normed = rows.normed(x.astype(jnp.float32), self.scale[...], self.eps, centered=self.centered)
        return (normed + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
