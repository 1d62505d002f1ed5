"""The features of a draft head (engine/models/heads/), by page.

The head reads for each token the feature of the one before. A step has these of the tokens that it
feeds. It lacks the one before a row's first token: that was fed in an earlier step, of this
sequence or of another that shares the page. So each page has the features of the tokens that were
fed last of it, in an array [rows * pages, hidden] (``PageTail``), where a token's row is its place
in the page modulo ``rows``. They are found, copied and freed with the page. A full page of the
prefix cache has that of its last token, which follows from the tokens of the page's key.

There are as many rows as a step feeds tokens of a row with drafts, or all of a page: whichever of
these tokens turns out to be the last one, its feature is there.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.attention.spec import PageTable
from caching.page_manager import SINK_PAGE


@dataclass(frozen=True)
class FeaturePages:
    """Where features are in such an array."""

    page_size: int
    num_pages: int
    rows: int

    def before(self, kept: Array, tables: Array, positions: Array) -> Array:
        """f[n, hidden] the features kept of the tokens before i32[n] positions, with page tables
        i32[n, pages_per_seq]; zeros before a first one."""
        last = jnp.maximum(positions - 1, 0)
        pages = jnp.take_along_axis(tables, (last // self.page_size)[:, None], axis=1)[:, 0]
        found = kept.at[self._places(pages, last)].get(mode="promise_in_bounds")
        return jnp.where((positions > 0)[:, None], found, np.array(0, kept.dtype))

    def shifted(self, kept: Array, features: Array, positions: Array, table: PageTable) -> tuple[Array, Array]:
        """f[T, hidden] features of a step's tokens at i32[T] positions -> those of the tokens
        before each, and ``kept`` with these.

        A row's first one lacks that. Within a page its own sequence has it from an earlier step,
        and this step may overwrite it; between pages another row of this step may write it.
        """
        counts = table.q_lens
        starts = jnp.where(counts > 0, table.kv_lens - counts, 0)
        within = self.before(kept, table.page_indices, starts)
        kept, within = jax.lax.optimization_barrier((kept, within))  # read first: else XLA copies it
        kept = self.after(kept, features, positions, table)
        between = self.before(kept, table.page_indices, starts)
        firsts = jnp.where((starts % self.page_size == 0)[:, None], between, within)
        shifted = jnp.roll(features, 1, axis=0)
        tokens = jnp.where(counts > 0, table.cu_q_lens[:-1], np.int32(len(features)))
        return shifted.at[tokens].set(firsts, mode="drop"), kept

    def after(self, kept: Array, features: Array, positions: Array, table: PageTable) -> Array:
        """``kept`` with f[T, hidden] features of a step's tokens at i32[T] positions."""
        return kept.at[self.written(positions, table)].set(features, mode="promise_in_bounds")

    def written(self, positions: Array, table: PageTable) -> Array:
        """i32[T] where the features of a step's tokens go, each to another place: of those whose row
        has later ones for the same, to the sink."""
        token = jnp.arange(len(positions), dtype=jnp.int32)
        row = jnp.searchsorted(table.cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
        is_real = row < table.num_seqs[0]
        row = jnp.where(is_real, row, 0)
        number = positions // self.page_size
        end = jnp.minimum(table.kv_lens[row], (number + 1) * self.page_size)
        pages = jnp.where(is_real & (positions >= end - self.rows), table.page_indices[row, number], SINK_PAGE)
        return self._places(pages, positions)

    def _places(self, pages: Array, positions: Array) -> Array:
        return positions % self.page_size % self.rows * self.num_pages + pages
