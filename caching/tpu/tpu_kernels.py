"""The attention kernels that there are for TPUs, ours and jax's, and which of them moves fewer bytes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from caching.attention.spec import AttentionKernel
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu import jax_attention as tpu_attention
from caching.tpu import pallas_attention
from caching.tpu.jax_attention import TPUAttention
from caching.tpu.pallas_attention import PallasAttention
from caching.tpu.tpu_chip import Chip

CONTEXTS = range(32, 4096, 32)
"""Tokens of the rows by which kernels are compared: all lengths matter alike, as a row goes through them."""


@dataclass(frozen=True)
class TPUKernel:
    """One of them, with pages as it lays them out."""

    name: str
    description: str
    attention: Callable[[Chip], AttentionKernel]
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache]
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]]
    """The kv_heads and head_dim that pages have for so many and so wide ones of a dtype."""
    holds_table: Callable[[int, int], bool]
    """Whether there is room for the page table of so many rows, and pages of the longest."""
    misfit: Callable[[int, np.dtype], str | None]
    """Why pages of so many tokens of a dtype cannot be read."""
    tokens_read: Callable[[Chip, PagedAttentionCacheMetaData, int, int], int]
    """Tokens of which keys and values are read for a row that has so many, by the most pages of a row."""
    tokens_written: Callable[[PagedAttentionCacheMetaData], float]
    """Tokens that are moved, there and back, for one that is written."""

    def bytes_moved(self, chip: Chip, page: PagedAttentionCacheMetaData, tokens: int) -> float:
        """HBM bytes that a decoding row of so many tokens moves in a layer."""
        moved = self.tokens_read(chip, page, tpu_attention.MAX_BLOCK_PAGES, tokens) + self.tokens_written(page)
        return moved * page.bytes_per_page / page.page_size


PALLAS = TPUKernel(
    "pallas",
    "our own TPU kernel",
    PallasAttention,
    pallas_attention.allocate,
    pallas_attention.stored_heads,
    pallas_attention.holds_table,
    pallas_attention.misfit,
    pallas_attention.tokens_read,
    pallas_attention.tokens_written,
)
JAX = TPUKernel(
    "jax",
    "jax's TPU kernel",
    TPUAttention,
    tpu_attention.allocate,
    tpu_attention.stored_heads,
    tpu_attention.holds_table,
    tpu_attention.misfit,
    tpu_attention.tokens_read,
    tpu_attention.tokens_written,
)


def by_bytes(chip: Chip, kv_heads: int, head_dim: int, page_size: int, dtype: np.dtype) -> list[TPUKernel]:
    """Kernels for pages of so many heads a chip, the one first that moves fewest bytes."""

    def moved(kernel: TPUKernel) -> float:
        stored, wide = kernel.stored_heads(kv_heads, head_dim, dtype)
        page = PagedAttentionCacheMetaData(
            num_layers=1, num_pages=1, page_size=page_size, num_kv_heads=stored, head_dim=wide, dtype=dtype
        )
        return sum(kernel.bytes_moved(chip, page, tokens) for tokens in CONTEXTS)

    return sorted((PALLAS, JAX), key=moved)
