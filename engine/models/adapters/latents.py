"""The projection of latent attention, and where an adapter's factors are beside it.

It is declared as a kernel from latents to all heads' keys and values, whose module it is to PEFT.
"""

from dataclasses import dataclass, replace
from typing import Any

from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import TP
from engine.models.adapters.adapted_latents import AdaptedLatents
from engine.models.adapters.kernels import AdaptedKernel, Factors
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.weight_format import Leaf

PROJECTION = "attention.kv_b"
"""The name of the parameter."""


@dataclass(frozen=True)
class AdaptedProjection(AdaptedKernel):
    """The projection of latents. ``entry`` has its path, and ``kernel_of`` it; the layout is MATRIX."""

    def block(self, layer: int | None, a: Factors, b: Factors) -> list[NDArray[Any]]:
        """One layer of an adapter: f[1, rank, latent], and f[heads, nope + v, rank]."""
        low, high = super().block(layer, a, b)
        return [low, high.T.reshape(*self.parameter.out(1), self.rank)]

    def leaves(self, slots: int) -> list[Leaf]:
        """f[1, slots * rank, latent], and f[heads, nope + v, slots * rank]."""
        parameter, columns = self.parameter, slots * self.rank
        low = Leaf((1, columns, parameter.shape[0]), self.dtype, (None, None, None))
        high = Leaf((*parameter.out(1), columns), self.dtype, (TP, None, None))
        return self.of_all_layers([low, high])

    @property
    def slot_axes(self) -> list[int]:
        """See AdaptedWeight."""
        return [-2, -1]

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """See AdaptedWeight."""
        return AdaptedLatents(value, *arrays)


def kernel_of(projection: Parameter) -> Parameter:
    """The array [heads, nope + v, latent] as a kernel [latent, heads, nope + v]."""
    heads, each, latent = projection.axes
    return replace(projection, role=Role.KERNEL, inputs=1, axes=(latent, heads, each))
