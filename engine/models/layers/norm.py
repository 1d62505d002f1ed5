"""The norms of decoders."""

from flax import nnx
from jax import Array

from engine.models.layers.row_operations import XLA_ROWS, RowOperations
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import TensorRule


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), f[..., hidden], computed in float32.

    If ``centered``, the mean is subtracted first (Ba et al. 2016).
    """

    def __init__(
        self, name: str, axes: Axes, eps: float, rule: TensorRule, make: ParameterFactory, *, centered: bool = False
    ) -> None:
        self.scale = make.scale(f"{name}.scale", axes, rule)
        self.eps, self.centered = eps, centered

    def __call__(self, x: Array, rows: RowOperations = XLA_ROWS) -> Array:
        return rows.normed(x, self.scale[...], self.eps, centered=self.centered)
