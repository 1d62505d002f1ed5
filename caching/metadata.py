"""The shape of a paged cache, or of one device's part of it, before memory is allocated."""

from dataclasses import dataclass, replace

import numpy as np

from caching.state.spec import StatePool


@dataclass(frozen=True)
class PageTail:
    """What a page has of its last tokens beside, the same on every device: a row of numbers each.

    In an array [rows * pages, size], one row of all pages after the other.
    """

    rows: int
    size: int
    """Numbers of a row."""
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Of one page."""
        return self.rows * self.size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class PagedAttentionCacheMetaData:
    """How many pages there are and what one holds; page 0 is the sink and has no owner."""

    num_layers: int
    """Layers that a page holds."""
    num_pages: int
    page_size: int
    """Tokens a page holds."""
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype
    vectors: int = 2
    """What a token has for each kv head: a key and a value; or 1, its latent for all heads."""
    stacked: bool = False
    """Whether all layers share one array of pages, one after the other, or each has its own."""
    windows: tuple[int | None, ...] = (None,)
    """By group of layers (caching/cache_groups.py), how many tokens are kept; None is all."""
    states: StatePool | None = None
    """The slots of recurrent states, in a model that has such."""
    tail: PageTail | None = None
    """What a page has beside keys and values, if it is of a draft head."""
    of_draft: "PagedAttentionCacheMetaData | None" = None
    """What a page holds of a draft model's layers beside; its number of pages does not count."""

    @property
    def draft(self) -> "PagedAttentionCacheMetaData | None":
        """``of_draft``, of as many pages as there are here."""
        return None if self.of_draft is None else replace(self.of_draft, num_pages=self.num_pages)

    @property
    def array_pages(self) -> list[int]:
        """Pages of each array of the pool: ``num_pages`` for each of its layers."""
        if self.stacked and self.num_layers:
            return [self.num_layers * self.num_pages]
        return [self.num_pages] * self.num_layers

    @property
    def num_usable_pages(self) -> int:
        """Pages that sequences can own: all but the sink."""
        return self.num_pages - 1

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all its layers, those of a draft model too."""
        numbers = self.vectors * self.num_kv_heads * self.page_size * self.head_dim
        beside = 0 if self.of_draft is None else self.of_draft.bytes_per_page
        beside += 0 if self.tail is None else self.tail.num_bytes
        return self.num_layers * numbers * self.dtype.itemsize + beside

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a sequence's recurrent states; 0 in a model without such."""
        return 0 if self.states is None else self.states.bytes_per_slot

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and slots."""
        return self.num_pages * self.bytes_per_page + (self.states.num_bytes if self.states else 0)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens take."""
    return -(-num_tokens // page_size)
