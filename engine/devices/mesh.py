"""The mesh of tensor parallelism (Shoeybi et al. 2019, Megatron-LM)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array, Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from numpy.typing import NDArray

TP = "tp"
"""The mesh axis over which heads, feed-forward and vocabulary are sharded."""
AXES = ("dp", "fsdp", "ep", TP, "sp")
"""The axes of eformer. All but ``tp`` have size 1."""

COPY = PartitionSpec()
"""Replicated on every device."""
LOGITS = PartitionSpec(None, TP)
"""f32[rows, vocab], sharded by vocabulary."""


@dataclass(frozen=True)
class DeviceMesh:
    """The devices of one engine, and the sharding of its arrays. One device needs no sharding."""

    devices: tuple[Device, ...]

    @property
    def size(self) -> int:
        """Devices that the model is sharded over."""
        return len(self.devices)

    @property
    def axis(self) -> str | None:
        """The mesh axis that arrays are sharded over; None on one device."""
        return TP if self.size > 1 else None

    @cached_property
    def num_local(self) -> int:
        """Devices of this mesh that belong to this process."""
        return sum(device.process_index == jax.process_index() for device in self.devices)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along ``tp``."""
        if self.devices == tuple(jax.devices()):
            return _mesh_of_all()
        return Mesh(np.array(self.devices).reshape(1, 1, 1, -1, 1), AXES)

    def sharding(self, *spec: str | None) -> Sharding:
        """The sharding for a PartitionSpec's axes; () replicates."""
        if self.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def place(self, tree: Any, specs: Any) -> Any:
        """Global arrays of numpy arrays that every process has. On one process, unchanged."""
        if self.num_local == self.size:
            return tree

        def place(leaf: NDArray[Any], spec: PartitionSpec) -> Array:
            return jax.make_array_from_callback(leaf.shape, self.sharding(*spec), lambda at: np.asarray(leaf[at]))

        return jax.tree.map(place, tree, specs)

    def shapes(self, tree: Any, *spec: str | None) -> Any:
        """ShapeDtypeStructs of arrays or shapes with this sharding, to lower a function with."""
        sharding = self.sharding(*spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def on_each(self, function: Callable[..., Any], specs: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
        """A shard_map of a function over the devices; on one device, the function itself.

        ``specs`` are trees of PartitionSpec, one per argument; ``out_specs`` is that of results.
        """
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)

    def laid(self, array: jax.Array, *spec: str | None) -> jax.Array:
        """The array with this sharding; the same array if it has it already."""
        there: jax.Array = jax.device_put(array, self.sharding(*spec))
        return there

    def maker(self, function: Callable[[], Any], specs: Any = COPY) -> Callable[[], Any]:
        """Jit a function so that its arrays are created sharded, never whole on one device.

        ``specs`` is a PartitionSpec, or a tree of such for each of its arrays.
        """
        if self.size == 1:
            return function
        return jax.jit(function, out_shardings=jax.tree.map(lambda spec: self.sharding(*spec), specs))


def one_device() -> DeviceMesh:
    """The first device of this process alone."""
    return DeviceMesh((jax.local_devices()[0],))


def _mesh_of_all() -> Mesh:
    """All devices, ordered so that neighbours on ``tp`` are neighbours on the wire."""
    from eformer.escale import create_mesh

    mesh: Mesh = create_mesh(tuple(-1 if axis == TP else 1 for axis in AXES), AXES)
    return mesh
