"""The arrays that hold adapters in slots on the device, beside the weights."""

import itertools
from collections.abc import Callable
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

from engine.devices.mesh import COPY, DeviceMesh
from engine.errors import ConfigurationError
from engine.models.adapters.kernels import AdaptedWeight
from engine.models.adapters.tables import AdaptedHead
from engine.models.adapters.weights import adapted_weights, has_room
from engine.models.decoder import Decoder
from engine.models.partition import Partition
from engine.models.weights.sources.text_part import beginnings
from engine.models.weights.store import Served, declared_entries, entries
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
    """Of factors, which are not quantised."""
    layout: Layout
    """Of the weights: adapters are beside weights in panels in panels, too."""
    targets: tuple[str, ...] = ()
    """The modules that slots have room for, by the ends of their names; by default all but experts,
    whose adapters are large."""


@dataclass(frozen=True)
class Slots:
    """The weights of a model that may have adapters, and how large these may be."""

    kernels: tuple[AdaptedWeight, ...]
    without_room: tuple[AdaptedWeight, ...]
    """Those that ``sizes.targets`` leaves out."""
    sizes: AdapterSizes
    unserved: tuple[str, ...]
    """The beginnings of the names of modules that the model has beside those that are served."""


@dataclass(frozen=True)
class SlotArrays(Slots):
    """For weights of a decoder the factors of all slots; a slot without an adapter is zeros.

    They are a flat list of what ``AdaptedWeight.leaves`` has for each weight.
    """

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
        return [make() for make in self._makers]

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
        """A decoder's state with the adapters beside its weights."""
        found: dict[Any, list[tuple[AdaptedWeight, tuple[Array, ...]]]] = {}
        for kernel, part in zip(self.kernels, self._parts, strict=True):
            found.setdefault(kernel.entry.path, []).append((kernel, tuple(arrays[part])))
        flat = []
        for path, variable in nnx.to_flat_state(state):
            for kernel, own in found.get(path, ()):
                variable = variable.replace(kernel.around(variable.get_value(), own))
            flat.append((path, variable))
        return nnx.from_flat_state(flat)

    @cached_property
    def head(self) -> int | None:
        """The number of the head among ``kernels``, if there is room for its adapters."""
        return next((number for number, one in enumerate(self.kernels) if isinstance(one, AdaptedHead)), None)

    def of_head(self, arrays: list[Any]) -> list[Any]:
        """Of all arrays, or what is said of each, those of the head."""
        assert self.head is not None
        return arrays[self._parts[self.head]]

    def adapted_head(self, table: Any, arrays: list[Array]) -> Any:
        """The head's table with its adapters; ``arrays`` are ``of_head``."""
        assert self.head is not None
        return self.kernels[self.head].around(table, tuple(arrays))

    @cached_property
    def _makers(self) -> list[Callable[[], Array]]:
        """Of each array. They are made once: where there are several devices each is a function that is compiled."""
        zeros = ((partial(jnp.zeros, leaf.shape, leaf.dtype), PartitionSpec(*leaf.split)) for leaf in self.leaves)
        return [self.mesh.maker(make, spec) for make, spec in zeros]

    @cached_property
    def _parts(self) -> list[slice]:
        """Of each kernel, its part of the list of arrays."""
        ends = list(itertools.accumulate(len(kernel.leaves(1)) for kernel in self.kernels))
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def _lower_write(self) -> Lowered:
        axes = [axis for kernel in self.kernels for axis in kernel.slot_axes]

        def write(arrays: list[Array], block: list[Array], slot: Array) -> list[Array]:
            return [
                jax.lax.dynamic_update_slice_in_dim(whole, part, slot * np.int32(part.shape[axis]), axis)
                for whole, part, axis in zip(arrays, block, axes, strict=True)
            ]

        on_each = self.mesh.on_each(write, (self.specs, self.specs, COPY), self.specs)
        slot = self.mesh.shapes(jax.ShapeDtypeStruct((), np.int32))
        return lower(on_each, self.shapes, [self._shape(leaf) for leaf in self.block], slot, donate=0)

    def _shape(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.mesh.sharding(*leaf.split))


def slot_arrays(decoder: Decoder, sizes: AdapterSizes, mesh: DeviceMesh) -> SlotArrays:
    """The slots of a decoder, whose weights may be abstract. Raises ConfigurationError if a target
    is no module of it."""
    partition = decoder.partition
    return SlotArrays(*_weights(entries(decoder), sizes, partition), sizes, beginnings(partition.model.unserved), mesh)


def declared_slots(partition: Partition, sizes: AdapterSizes) -> Slots:
    """The slots of a model of which nothing is read and nothing is on a device. Raises as ``slot_arrays`` does."""
    kernels, without_room = _weights(declared_entries(partition), sizes, partition)
    return Slots(kernels, without_room, sizes, beginnings(partition.model.unserved))


def adapter_bytes(partition: Partition, sizes: AdapterSizes | None) -> int:
    """Bytes on each device of all slots, and of an adapter on its way to one; 0 without slots.

    Raises ConfigurationError if a target is no module of the model.
    """
    if sizes is None:
        return 0
    kernels = declared_slots(partition, sizes).kernels
    leaves = [leaf for kernel in kernels for leaf in (*kernel.leaves(sizes.max_loras), *kernel.leaves(1))]
    return sum(leaf.nbytes(partition.devices) for leaf in leaves)


def _weights(
    declared: list[Served], sizes: AdapterSizes, partition: Partition
) -> tuple[tuple[AdaptedWeight, ...], tuple[AdaptedWeight, ...]]:
    """The weights that slots have room for, and the others that may have adapters."""
    every = list(adapted_weights(declared, partition, sizes.max_lora_rank, sizes.dtype, sizes.layout))
    for target in sizes.targets:
        if not any(has_room(kernel, (target,)) for kernel in every):
            raise ConfigurationError(f"lora_target_modules: {target} is no module of this model that may have adapters")
    with_room = [has_room(kernel, sizes.targets) for kernel in every]
    return (
        tuple(kernel for kernel, has in zip(every, with_room, strict=True) if has),
        tuple(kernel for kernel, has in zip(every, with_room, strict=True) if not has),
    )
