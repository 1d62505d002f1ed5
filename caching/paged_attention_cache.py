"""The device memory behind the pages: a pytree that the compiled step takes donated and gives back."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import stored_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttentionCache:
    """``layers[i]`` holds layer i's pages, or those of the i-th stack of layers, laid out as the backend's attention reads them.

    Here that is ``[pages, kv_heads, 2, page_size, head_dim]``, keys before values: head-major, so that one head's keys of
    a page are contiguous, what a CPU reads fastest. One array per layer lets XLA update each in place; nothing in a step
    may copy one.
    """

    layers: tuple[Array, ...]

    @classmethod
    def allocate(cls, metadata: PagedAttentionCacheMetaData) -> "PagedAttentionCache":
        """Zeroed pages on the default device. Raises jax.errors.JaxRuntimeError where they do not fit."""
        layer = cls.layer_struct(metadata)
        return cls(tuple(jnp.zeros((pages, *layer.shape[1:]), layer.dtype) for pages in metadata.array_pages))

    @staticmethod
    def layer_struct(metadata: PagedAttentionCacheMetaData) -> jax.ShapeDtypeStruct:
        """One layer's shape and dtype."""
        shape = (metadata.num_pages, metadata.num_kv_heads, 2, metadata.page_size, metadata.head_dim)
        return jax.ShapeDtypeStruct(shape, stored_dtype(metadata.dtype))
