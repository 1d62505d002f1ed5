"""A decoder in two parts: the structure that programs are traced with, and the weights that they are given."""

from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from caching.metadata import PagedAttentionCacheMetaData
from engine.devices.mesh import COPY, DeviceMesh
from engine.models.weights.store import AnyDecoder
from engine.step.backend import CACHE, Backend
from engine.step.inputs.slot_state import SlotShapes


class SplitDecoder:
    """``weights`` are the decoder's arrays, in the order in which programs take them; they may be
    abstract."""

    def __init__(self, decoder: AnyDecoder) -> None:
        self.whole = decoder
        """The decoder, with the arrays that it has now."""
        self._graph, state = nnx.split(decoder)
        self.weights: list[Array]
        self.weights, self._structure = jax.tree.flatten(state)

    def adopt_weights(self) -> None:
        """Take the arrays that the decoder has now, of the same shapes."""
        self.weights = jax.tree.leaves(nnx.state(self.whole))

    def state(self, weights: list[Array]) -> Any:
        """The nnx.State with these weights."""
        return jax.tree.unflatten(self._structure, weights)

    def decoder(self, state: Any) -> Any:
        """The decoder with this state."""
        return nnx.merge(self._graph, state)

    def arguments(
        self, backend: Backend, pool: PagedAttentionCacheMetaData, slots: SlotShapes, mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        """The abstract arguments with which the programs of a step begin: weights, and those of
        ``state_arguments``."""
        return [shape_of(leaf) for leaf in self.weights], *state_arguments(backend, pool, slots, mesh)

    @property
    def specs(self) -> tuple[Any, ...]:
        """How these are sharded."""
        return self.weight_specs, CACHE, COPY, COPY

    @property
    def weight_specs(self) -> list[PartitionSpec]:
        """How the weights are sharded."""
        return [spec_of(leaf.sharding) for leaf in self.weights]


def state_arguments(
    backend: Backend, pool: PagedAttentionCacheMetaData, slots: SlotShapes, mesh: DeviceMesh
) -> tuple[Any, ...]:
    """The abstract cache, SlotState, and what rows are fed."""
    state = (mesh.shapes(jax.eval_shape(new)) for new in (slots.new_state, slots.new_fed))
    return backend.abstract_cache(pool, mesh), *state


def shape_of(leaf: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What a program is lowered with in the place of this array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def spec_of(sharding: Sharding) -> PartitionSpec:
    """How a shard_map splits an array of this sharding."""
    return sharding.spec if isinstance(sharding, NamedSharding) else COPY
