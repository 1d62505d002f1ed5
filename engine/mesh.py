"""The devices that one model is spread over by tensor parallelism (Shoeybi et al. 2019, Megatron-LM)."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from engine.errors import ConfigurationError

TP = "tp"
"""The mesh axis over which heads, feed-forward and vocabulary are split."""
AXES = ("dp", "fsdp", "ep", TP, "sp")
"""eformer's, of which all but ``tp`` are 1."""

COPY = PartitionSpec()
"""What every device has the whole of."""
LOGITS = PartitionSpec(None, TP)
"""f32[rows, vocab], of which every device has its part of the vocabulary."""


@dataclass(frozen=True)
class DeviceMesh:
    """Where the arrays of an engine lie. On one device they are ordinary arrays, and nothing here costs anything."""

    devices: tuple[Device, ...]

    @property
    def size(self) -> int:
        """Devices that the model is spread over."""
        return len(self.devices)

    @property
    def axis(self) -> str | None:
        """The mesh axis that arrays are split over; None on one device."""
        return TP if self.size > 1 else None

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along ``tp``."""
        if self.devices == tuple(jax.devices()):
            return _mesh_of_all()
        return Mesh(np.array(self.devices).reshape(1, 1, 1, -1, 1), AXES)

    def sharding(self, *spec: str | None) -> Sharding:
        """Where an array lies of which axes are split over the devices, as PartitionSpec has it; () is a copy on each."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def shapes(self, tree: Any, *spec: str | None) -> Any:
        """Arrays, or shapes of them, as shapes of arrays that lie so: what to lower a function with."""
        sharding = self.sharding(*spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def on_each(self, function: Callable[..., Any], specs: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
        """A function that every device calls with its own part of the arguments; on one device the function itself.

        ``specs`` are trees of PartitionSpec, one for each argument; ``out_specs`` is one for the results.
        """
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)

    def laid(self, array: jax.Array, *spec: str | None) -> jax.Array:
        """An array where it is to lie; the same one where it does already."""
        there: jax.Array = jax.device_put(array, self.sharding(*spec))
        return there

    def maker(self, function: Callable[[], Any], *spec: str | None) -> Callable[[], Any]:
        """A function that makes arrays where they lie: on a mesh none is ever whole in one place. Compiled but once."""
        return function if self.size == 1 else jax.jit(function, out_shardings=self.sharding(*spec))


def one_device() -> DeviceMesh:
    """The first device of this process, by itself."""
    return DeviceMesh((jax.local_devices()[0],))


def _mesh_of_all() -> Mesh:
    """All devices in an order that makes their neighbours on ``tp`` neighbours on the wire."""
    if importlib.util.find_spec("eformer") is None:
        raise ConfigurationError(
            'eformer, which lays out several devices, is not installed: pip install "odriver[tpu]"'
        )
    from eformer.escale import create_mesh

    mesh: Mesh = create_mesh(tuple(-1 if axis == TP else 1 for axis in AXES), AXES)
    return mesh
