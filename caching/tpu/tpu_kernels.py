"""The attention kernels for TPUs, ours and jax's, ordered by the bytes that they move."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from caching.attention.spec import Kernel
from caching.attention.xla_attention import DECODE_BLOCK_TOKENS, XLAAttention
from caching.attention.xla_latents import XLALatentAttention
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu import jax_attention, pallas_attention
from caching.tpu.jax_attention import TPUAttention
from caching.tpu.pallas_attention import PallasAttention
from caching.tpu.tpu_chip import LANES, Chip

CONTEXTS = range(32, 4096, 32)
"""Lengths in tokens at which kernels are compared, all with the same weight."""


@dataclass(frozen=True)
class TPUKernel:
    """A kernel and the layout of its pages."""

    name: str
    description: str
    attention: Callable[[Chip], Kernel]
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache]
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]]
    """The kv_heads and head_dim of pages, for a model's kv_heads, head_dim and a dtype."""
    misfit: Callable[[int, np.dtype, str | None], str | None]
    """Why it cannot serve, and what to choose instead; or None. Of page_size in tokens, dtype, and what
    else attention needs."""
    tokens_read: Callable[[Chip, PagedAttentionCacheMetaData, int, int], int]
    """Tokens whose keys and values are read: chip, pages, most pages of a row, tokens of a row."""
    tokens_written: Callable[[PagedAttentionCacheMetaData], float]
    """Tokens moved, read and written, per token written."""
    loops: bool = False
    """Whether it is a loop of XLA's and no call, so that a compiled step's text shows one turn."""
    most_pages_per_seq: int | None = jax_attention.MOST_PAGES_PER_SEQ
    """The longest page table of a sequence that it has room for; None is any."""

    def bytes_moved(self, chip: Chip, page: PagedAttentionCacheMetaData, tokens: int) -> float:
        """HBM bytes that a decoding row of ``tokens`` moves in a layer."""
        moved = self.tokens_read(chip, page, jax_attention.MAX_BLOCK_PAGES, tokens) + self.tokens_written(page)
        return moved * page.bytes_per_page / page.page_size


PALLAS = TPUKernel(
    "pallas",
    "our own TPU kernel",
    PallasAttention,
    pallas_attention.allocate,
    pallas_attention.stored_heads,
    pallas_attention.misfit,
    pallas_attention.tokens_read,
    pallas_attention.tokens_written,
)
JAX = TPUKernel(
    "jax",
    "jax's TPU kernel",
    TPUAttention,
    jax_attention.allocate,
    jax_attention.stored_heads,
    jax_attention.misfit,
    jax_attention.tokens_read,
    jax_attention.tokens_written,
)


def _allocate_latents(metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
    page = (metadata.num_kv_heads, metadata.vectors, metadata.page_size, metadata.head_dim)
    return PagedAttentionCache(tuple(jnp.zeros((pages, *page), metadata.dtype) for pages in metadata.array_pages))


KEYS_A_TURN = 8192
"""10 MB of latents: 13 microseconds of a v5e's memory, and room enough on the chip."""
LATENTS = TPUKernel(
    "xla",
    "XLA's operations",
    attention=lambda chip: XLALatentAttention(keys_a_turn=KEYS_A_TURN),  # noqa: ARG005
    allocate=_allocate_latents,
    stored_heads=lambda kv_heads, width, dtype: (kv_heads, -(-width // LANES) * LANES),  # noqa: ARG005
    misfit=lambda page_size, dtype, extras: None,  # noqa: ARG005
    tokens_read=lambda chip, page, pages_per_seq, tokens: -(-tokens // page.page_size) * page.page_size,  # noqa: ARG005
    tokens_written=lambda page: 2.0,  # noqa: ARG005
    loops=True,
)
"""Of models whose pages have latents."""


def of_xla(kv_dtype: np.dtype) -> TPUKernel:
    """XLA's operations over pages of this dtype, which may be any."""
    return TPUKernel(
        "xla",
        "XLA's operations",
        attention=lambda chip: XLAAttention(kv_dtype),  # noqa: ARG005
        allocate=PagedAttentionCache.allocate,
        stored_heads=lambda kv_heads, head_dim, dtype: (kv_heads, stored_head_dim(head_dim, dtype)),
        misfit=lambda page_size, dtype, extras: None,  # noqa: ARG005
        tokens_read=lambda chip, page, pages_per_seq, tokens: -(-tokens // DECODE_BLOCK_TOKENS) * DECODE_BLOCK_TOKENS,  # noqa: ARG005
        tokens_written=lambda page: 2.0,  # noqa: ARG005
        loops=True,
        most_pages_per_seq=None,
    )


def by_bytes(chip: Chip, kv_heads: int, head_dim: int, page_size: int, dtype: np.dtype) -> list[TPUKernel]:
    """The kernels for pages of ``kv_heads`` a chip, fewest bytes moved first."""

    def moved(kernel: TPUKernel) -> float:
        stored, wide = kernel.stored_heads(kv_heads, head_dim, dtype)
        page = PagedAttentionCacheMetaData(
            num_layers=1, num_pages=1, page_size=page_size, num_kv_heads=stored, head_dim=wide, dtype=dtype
        )
        return sum(kernel.bytes_moved(chip, page, tokens) for tokens in CONTEXTS)

    return sorted((PALLAS, JAX), key=moved)
