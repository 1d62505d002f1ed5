"""The device memory of pages and states: a pytree that the step takes donated and returns."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import stored_dtype
from caching.state.spec import StatePool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttentionCache:
    """``layers[i]`` has the pages of layer i, or of the i-th stack, in the backend's layout.

    Here that is [pages, kv_heads, 2, page_size, head_dim], keys before values: a CPU reads one
    head's contiguous keys fastest. Of latents it is [pages, 1, 1, page_size, head_dim]. XLA updates
    a layer's array in place; no step may copy one.
    """

    layers: tuple[Array, ...]
    states: tuple[tuple[Array, ...], ...] = ()
    """The arrays [slots, ...] of each layer that has a state, or of all: [layers * slots, ...]."""
    draft: tuple[Array, ...] = ()
    """Like ``layers``, of a draft model: what its layers have of the tokens in the same pages. Of a
    draft head its PageTail comes last."""

    @property
    def caches(self) -> tuple[Array | tuple[Array, ...], ...]:
        """Those of the model's own layers: of pages first, then those of states."""
        return self.layers + self.states

    def with_caches(self, caches: Sequence[Array | tuple[Array, ...] | None]) -> "PagedAttentionCache":
        """These in the place of its own ``caches``."""
        count = len(self.layers)
        return PagedAttentionCache(tuple(caches[:count]), tuple(caches[count:]), self.draft)  # type: ignore[arg-type]

    @classmethod
    def allocate(cls, metadata: PagedAttentionCacheMetaData) -> "PagedAttentionCache":
        """Zeroed pages on the default device. Raises jax.errors.JaxRuntimeError without room."""
        layer = cls.layer_struct(metadata)
        return cls(tuple(jnp.zeros((pages, *layer.shape[1:]), layer.dtype) for pages in metadata.array_pages))

    @staticmethod
    def layer_struct(metadata: PagedAttentionCacheMetaData) -> jax.ShapeDtypeStruct:
        """One layer's shape and dtype."""
        shape = (metadata.num_pages, metadata.num_kv_heads, metadata.vectors, metadata.page_size, metadata.head_dim)
        return jax.ShapeDtypeStruct(shape, stored_dtype(metadata.dtype))


def allocate_tail(pool: PagedAttentionCacheMetaData) -> tuple[Array, ...]:
    """The zeroed PageTail of all pages, if there is one. Raises as ``allocate`` does."""
    tail = pool.tail
    return () if tail is None else (jnp.zeros((tail.rows * pool.num_pages, tail.size), tail.dtype),)


def allocate_states(pool: StatePool | None) -> tuple[tuple[Array, ...], ...]:
    """Zeroed slots on the default device. Raises jax.errors.JaxRuntimeError without room."""
    if pool is None:
        return ()
    each, slots = (1, pool.num_layers * pool.num_slots) if pool.stacked else (pool.num_layers, pool.num_slots)
    return tuple(tuple(jnp.zeros((slots, *shape), dtype) for shape, dtype in pool.arrays) for _ in range(each))
