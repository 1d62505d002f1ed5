"""The device memory of the pages: a pytree that the step takes donated and returns."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import stored_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttentionCache:
    """``layers[i]`` has the pages of layer i, or of the i-th stack, in the backend's layout.

    Here that is [pages, kv_heads, 2, page_size, head_dim], keys before values: a CPU reads one
    head's contiguous keys fastest. XLA updates a layer's array in place; no step may copy one.
    """

    layers: tuple[Array, ...]

    @classmethod
    def allocate(cls, metadata: PagedAttentionCacheMetaData) -> "PagedAttentionCache":
        """Zeroed pages on the default device. Raises jax.errors.JaxRuntimeError without room."""
        layer = cls.layer_struct(metadata)
        return cls(tuple(jnp.zeros((pages, *layer.shape[1:]), layer.dtype) for pages in metadata.array_pages))

    @staticmethod
    def layer_struct(metadata: PagedAttentionCacheMetaData) -> jax.ShapeDtypeStruct:
        """One layer's shape and dtype."""
        shape = (metadata.num_pages, metadata.num_kv_heads, 2, metadata.page_size, metadata.head_dim)
        return jax.ShapeDtypeStruct(shape, stored_dtype(metadata.dtype))
