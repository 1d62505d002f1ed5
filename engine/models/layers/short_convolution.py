"""A gated short convolution, the mixer of most layers of LFM2 and LFM3 (Liquid AI 2025)."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from caching.state.convolution import convolve
from caching.state.spec import StateArray
from engine.models.layers.mixer import State
from engine.models.layers.recurrent import slots_of
from engine.models.linear import linear
from engine.models.partition import Partition
from engine.models.requirements import require
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import Axes, ParameterFactory
from engine.models.weights.parameters import LAYER, TensorRule, tensors

CONVOLUTION = f"{LAYER}conv."


@dataclass(frozen=True)
class ShortConvolutionSpec:
    """``out(c * convolution(b * x))`` where b, c and x are products of the input. A MixerSpec."""

    channels: int
    taps: int
    """Tokens that the convolution sees."""
    bias: bool = False
    """Of both products and of the convolution."""
    rotated: ClassVar[None] = None
    extras: ClassVar[None] = None

    def __post_init__(self) -> None:
        """Raises UnsupportedError for a convolution of one token."""
        require(self.taps > 1, f"conv_L_cache {self.taps} is not supported")

    @property
    def cached(self) -> State:
        """See MixerSpec."""
        gated = StateArray((self.channels,))
        return State((gated.repeated(self.taps - 1),), (gated,))

    def flops(self, tokens: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 2 * (self.taps + 1) * self.channels // devices

    def indivisible(self, devices: int) -> str | None:
        """See MixerSpec."""
        return f"the {self.channels} channels of the convolution" if self.channels % devices else None

    def scratch(self, head_dim: int, devices: int) -> int:  # noqa: ARG002
        """See MixerSpec."""
        return 6 * self.channels // devices

    def build(self, partition: Partition, make: ParameterFactory) -> "ShortConvolution":
        """See MixerSpec."""
        return ShortConvolution(self, partition, make)


class ShortConvolution(nnx.Module):
    """The first kernel is f[hidden, 3, channels], of b, c and x."""

    def __init__(self, spec: ShortConvolutionSpec, partition: Partition, make: ParameterFactory) -> None:
        hidden, channels = {"hidden": partition.model.hidden_size}, {"heads": spec.channels}
        parts = {"group": 3, **channels}

        def rule(name: str) -> TensorRule:
            return tensors(f"{CONVOLUTION}{name}")

        def bias(name: str, axes: Axes, rule: TensorRule) -> nnx.Param[Array] | None:
            return make.bias(f"short_convolution.{name}", axes, rule) if spec.bias else None

        of_parts = tensors(f"{CONVOLUTION}in_proj.bias", stored="(group heads)")
        of_taps = tensors(f"{CONVOLUTION}conv.weight", stored="heads () taps")
        self.in_kernel = make.kernel("short_convolution.in_kernel", hidden, parts, rule("in_proj.weight"))
        self.in_bias = bias("in_bias", parts, of_parts)
        self.convolution = make.scale("short_convolution.convolution", {"taps": spec.taps, **channels}, of_taps)
        self.convolution_bias = bias("convolution_bias", channels, rule("conv.bias"))
        self.out_kernel = make.kernel(
            "short_convolution.out_kernel", channels, hidden, rule("out_proj.weight"), last=True
        )
        self.out_bias = bias("out_bias", hidden, rule("out_proj.bias"))
        self.spec, self.axis, self.devices = spec, make.axis, make.devices

    def __call__(self, x: Array, cache: LayerCache, place: Place, step: StepContext) -> tuple[LayerCache, Array]:
        slots = slots_of(x, cache, place, step, self.spec.cached, self.devices)
        parts = linear(x.reshape(-1, x.shape[-1]), self.in_kernel, self.in_bias, step.adapters)
        before, behind, own = parts[:, 0], parts[:, 1], parts[:, 2]
        bias = None if self.convolution_bias is None else self.convolution_bias[...].astype(jnp.float32)
        windows, convolved = convolve(slots.table, slots.windows, before * own, self.convolution[...], bias)
        gated = (behind * convolved.astype(x.dtype)).reshape(*x.shape[:-1], -1)
        out = linear(gated, self.out_kernel, self.out_bias, step.adapters, self.axis)
        return None if cache is None else slots._replace(windows=windows).cache, out
