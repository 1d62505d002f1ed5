"""Where parameters lie on the devices: split by rule, kernels as matrices and layers in stacks where a backend wants them so."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from caching.page_dtype import quantize
from engine.mesh import DeviceMesh
from engine.models.checkpoint import Checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.linear import FlatKernel, Scale
from engine.models.parameters import Parameter, assemble
from engine.models.sharding import flat_spec, spec_of

Arrange = Callable[[Decoder], None]
"""Changes a decoder of shapes into the form that a backend's steps read: ``Decoder.flatten``, ``Decoder.stack``."""


def as_it_is(decoder: Decoder) -> None:
    """An Arrange that changes nothing."""
    del decoder


def source_names(path: tuple[Any, ...], config: ModelConfig) -> list[str]:
    """The parameters, by their names in a decoder that is not arranged, that lie at a path of one that is.

    Scales are made of what they scale.
    """
    path = (*path[:-1], path[-1].removesuffix("_scale"))
    if path[0] != "layers" or path[2] != "layer":
        return [".".join(map(str, path))]
    starts = [0, *accumulate(config.runs)]
    within = ".".join(map(str, path[3:]))
    return [f"layers.{layer}.{within}" for layer in range(starts[path[1]], starts[path[1] + 1])]


def placed_spec(variable: Any, source: Parameter) -> PartitionSpec:
    """How what is made of a parameter, or of a stack of such, is split."""
    own = spec_of(source.name)
    if isinstance(variable, FlatKernel) or (isinstance(variable, Scale) and variable.is_flat):
        own = flat_spec(own)
    if isinstance(variable, Scale):
        own = _without(own, variable.axis)
    return PartitionSpec(None, *own) if _is_stacked(variable, source) else own


class Placement:
    """Reads parameters into the devices' parts of them."""

    def __init__(self, checkpoint: Checkpoint, mesh: DeviceMesh, hear: Callable[[Parameter], None]) -> None:
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._hear = hear

    def load(self, variable: Any, sources: Sequence[Parameter]) -> Array:
        """The array of a variable: its one source, or a stack of them, filled in place one after the other."""
        (array,) = self._load([variable], sources, lambda array: [array])
        return array

    def load_quantized(self, variable: Any, scale: Scale, sources: Sequence[Parameter]) -> tuple[Array, Array]:
        """The same of an int8 variable and its scale; of each source in turn, so that none but one is held whole."""
        numbers, scales = self._load([variable, scale], sources, partial(_quantize, axis=scale.axis))
        return numbers, scales

    def _load(
        self, variables: Sequence[Any], sources: Sequence[Parameter], made_of: Callable[[Array], Sequence[Array]]
    ) -> list[Array]:
        flat, stacked = isinstance(variables[0], FlatKernel), _is_stacked(variables[0], sources[0])
        specs = [placed_spec(variable, sources[0]) for variable in variables]
        if not stacked:
            made = made_of(self._place(sources[0], flat))
            return [self._mesh.laid(array, *spec) for array, spec in zip(made, specs, strict=True)]
        stacks: list[Array] = []
        for place, source in enumerate(sources):
            made = made_of(self._place(source, flat))
            if not stacks:
                stacks = [
                    self._mesh.maker(partial(jnp.zeros, (len(sources), *array.shape), array.dtype), *spec)()
                    for array, spec in zip(made, specs, strict=True)
                ]
            stacks = [_fill(stack, layer, np.int32(place)) for stack, layer in zip(stacks, made, strict=True)]
        return stacks

    def _place(self, parameter: Parameter, flat: bool) -> Array:
        """Each device's part, read for it alone."""
        spec = spec_of(parameter.name)
        whole = self._mesh.sharding(*spec)
        parts = []
        for device, index in whole.addressable_devices_indices_map(parameter.shape).items():
            assert index is not None
            part = assemble(self._checkpoint, parameter, index)
            parts.append(jax.device_put(part.reshape(part.shape[0], -1) if flat else part, device))
        shape = (parameter.shape[0], int(np.prod(parameter.shape[1:]))) if flat else parameter.shape
        array = jax.make_array_from_single_device_arrays(
            shape, self._mesh.sharding(*flat_spec(spec)) if flat else whole, parts
        )
        jax.block_until_ready(array)  # or transfers under way would keep their parameters on the host
        self._hear(parameter)
        return array


def _is_stacked(variable: Any, source: Parameter) -> bool:
    rank = 2 if isinstance(variable, FlatKernel) else len(source.shape)
    if isinstance(variable, Scale):
        rank = 1 if variable.is_flat else len(source.shape) - 1
    return len(variable.shape) > rank


def _without(spec: PartitionSpec, axis: int) -> PartitionSpec:
    return PartitionSpec(*spec[:axis], *spec[axis + 1 :])


_quantize = jax.jit(quantize, static_argnames="axis")


@partial(jax.jit, donate_argnums=0)
def _fill(stack: Array, layer: Array, place: Array) -> Array:
    filled: Array = jax.lax.dynamic_update_index_in_dim(stack, layer, place, 0)
    return filled
