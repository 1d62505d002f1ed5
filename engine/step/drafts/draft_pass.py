"""What DRAFT runs once for each place behind a row's last token: a draft model, or a draft head."""

from typing import Any, Protocol

from jax import Array

from caching.attention.spec import PageTable
from caching.paged_attention_cache import PagedAttentionCache
from engine.sampling.sampler_inputs import SamplerInputs
from engine.step.inputs.layout import ModelInputBatch

Pages = tuple[Array, ...]
"""Arrays of a PagedAttentionCache: ``draft``, or for an assistant ``layers`` and then ``draft``."""


class DraftPass(Protocol):
    """A draft model or a draft head. Its weights may be abstract.

    Its methods are for the bodies of programs, and take the weights that these are given.
    """

    @property
    def weights(self) -> list[Array]:
        """What the programs take first."""

    def adopt_weights(self) -> None:
        """Take the arrays that the model or head has now, of the same shapes."""

    @property
    def specs(self) -> list[Any]:
        """How these are sharded."""

    @property
    def feeds_last(self) -> bool:
        """Whether DRAFT feeds it the last draft, too, as no other program of the step does."""

    @property
    def stays(self) -> bool:
        """Whether it makes all drafts of a row at the position of the row's last token."""

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """What it reads and writes."""

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """The cache with these in the place of its ``pages``."""

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:
        """f[rows, size] what it is to know of the tokens before i32[rows] positions, with page
        tables i32[groups, rows, pages_per_seq]; of size 0 if that is nothing."""

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """The pages with i32[rows] tokens at i32[rows] positions, hidden states f[rows, hidden], and
        the ``features`` of these tokens. Those given are of the tokens before them.

        ``table`` has all groups of the model's layers.
        """

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """i32[rows] drafts from f[rows, hidden], drawn with the random numbers that will draw the
        tokens in their places."""


class FedPass(DraftPass, Protocol):
    """A draft head: FORWARD gives it what the model makes of a step's tokens."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the model, those whose input it reads."""

    def feed(self, weights: list[Array], pages: Pages, batch: ModelInputBatch, hidden: Array, taps: Array) -> Pages:
        """``PagedAttentionCache.draft`` with the tokens of a step, of which the model has f[T, hidden]
        behind its last norm, and f[taps, T, hidden]."""


def of_group(table: PageTable, group: int) -> PageTable:
    """The model's tables -> that of a group, for all layers of a draft model."""
    return PageTable(table.kv_lens, table.page_indices[group][None], table.cu_q_lens, table.num_seqs)
