"""The arrays that hold adapters in slots on the device, beside the weights."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.stages import Lowered
from numpy.typing import NDArray

from engine.mesh import COPY, DeviceMesh
from engine.models.adapters.adapted import Adapted, GroupedAdapted
from engine.models.adapters.kernels import AdaptedKernel, adapted_kernels
from engine.models.decoder import Decoder
from engine.models.partition import Partition
from engine.models.weights.store import declared_entries, entries
from engine.models.weights.weight_format import Layout, Leaf
from engine.step.compilation import Program, lower

WRITE_ADAPTER = "write adapter"
"""(arrays, block, slot i32[]) -> arrays, which are donated. ``block`` is of one slot."""


@dataclass(frozen=True)
class AdapterSizes:
    """How many adapters fit on the device."""

    max_loras: int
    max_lora_rank: int
    dtype: np.dtype[Any]
    """Of activations: adapters are not quantised."""
    layout: Layout
    """Of the weights: adapters are beside weights in panels in panels, too."""


@dataclass(frozen=True)
class SlotArrays:
    """For each kernel of a decoder the factors of all slots; a slot without an adapter is zeros.

    They are a flat list of what ``AdaptedKernel.leaves`` has for each kernel.
    """

    kernels: tuple[AdaptedKernel, ...]
    sizes: AdapterSizes
    mesh: DeviceMesh

    @cached_property
    def leaves(self) -> list[Leaf]:
        """All slots' arrays."""
        return [leaf for kernel in self.kernels for leaf in kernel.leaves(self.sizes.max_loras)]

    @cached_property
    def block(self) -> list[Leaf]:
        """One slot's part of them."""
        return [leaf for kernel in self.kernels for leaf in kernel.leaves(1)]

    @cached_property
    def specs(self) -> list[PartitionSpec]:
        """The sharding of each array, and of each of a block."""
        return [COPY if self.mesh.size == 1 else PartitionSpec(*leaf.split) for leaf in self.leaves]

    @cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """To lower a function with."""
        return [self._shape(leaf) for leaf in self.leaves]

    def new(self) -> list[Array]:
        """Slots without adapters."""
        makers = [self.mesh.maker(partial(jnp.zeros, leaf.shape, leaf.dtype), *leaf.split) for leaf in self.leaves]
        return [make() for make in makers]

    def placed(self, block: tuple[NDArray[Any], ...]) -> list[Array]:
        """An adapter's arrays on their way to the devices; returns at once."""
        whole = list(zip(block, self.block, strict=True))
        if self.mesh.num_local == self.mesh.size:
            return [jax.device_put(array, self.mesh.sharding(*leaf.split)) for array, leaf in whole]
        return [self.mesh.place(array, PartitionSpec(*leaf.split)) for array, leaf in whole]

    def write(self) -> Program:
        """WRITE_ADAPTER."""
        return Program(WRITE_ADAPTER, self.sizes.max_loras, self._lower_write)

    def adapted(self, state: Any, arrays: list[Array]) -> Any:
        """A decoder's state with the adapters beside its kernels."""
        at, kernels = 0, {}
        form = GroupedAdapted if self.sizes.layout is Layout.PANELS else Adapted
        for kernel in self.kernels:
            count = len(kernel.modules)
            kernels[kernel.entry.path] = kernel, arrays[at], tuple(arrays[at + 1 : at + 1 + count])
            at += 1 + count
        flat = []
        for path, variable in nnx.to_flat_state(state):
            if path in kernels:
                kernel, a, b = kernels[path]
                variable = variable.replace(form(variable.get_value(), a, b, kernel.parts))
            flat.append((path, variable))
        return nnx.from_flat_state(flat)

    def _lower_write(self) -> Lowered:
        axis = 0 if self.sizes.layout is Layout.PANELS else -2

        def write(arrays: list[Array], block: list[Array], slot: Array) -> list[Array]:
            return [
                jax.lax.dynamic_update_slice_in_dim(whole, part, slot * np.int32(part.shape[axis]), axis)
                for whole, part in zip(arrays, block, strict=True)
            ]

        on_each = self.mesh.on_each(write, (self.specs, self.specs, COPY), self.specs)
        slot = self.mesh.shapes(jax.ShapeDtypeStruct((), np.int32))
        return lower(on_each, self.shapes, [self._shape(leaf) for leaf in self.block], slot, donate=0)

    def _shape(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.mesh.sharding(*leaf.split))


def slot_arrays(decoder: Decoder, sizes: AdapterSizes, mesh: DeviceMesh) -> SlotArrays:
    """The slots of a decoder, whose weights may be abstract."""
    kernels = adapted_kernels(entries(decoder), sizes.max_lora_rank, mesh.size, sizes.dtype, sizes.layout)
    return SlotArrays(kernels, sizes, mesh)


def adapter_bytes(partition: Partition, sizes: AdapterSizes | None) -> int:
    """Bytes on each device of all slots, and of an adapter on its way to one; 0 without slots."""
    if sizes is None:
        return 0
    declared = declared_entries(partition)
    kernels = adapted_kernels(declared, sizes.max_lora_rank, partition.devices, sizes.dtype, sizes.layout)
    leaves = [leaf for kernel in kernels for leaf in (*kernel.leaves(sizes.max_loras), *kernel.leaves(1))]
    return sum(leaf.nbytes(partition.devices) for leaf in leaves)
