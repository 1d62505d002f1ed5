"""A draft head with a layer of its own, as the programs of a step run it."""

from dataclasses import replace
from typing import Any, cast

from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.models.decoder import Decoder
from engine.models.heads.eagle_head import EagleHead
from engine.models.heads.mtp_head import MTPHead
from engine.models.step_context import StepContext
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.feature_pages import FeaturePages
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages, of_group
from engine.step.drafts.head_weights import HeadWeights
from engine.step.layout import ModelInputBatch
from engine.step.paged_attention import PagedAttention


class HeadPass:
    """A FedPass of a head, which FORWARD feeds all tokens of a step, drafts too.

    What DRAFT fed it of drafts was made of its own hidden states; now there are the model's. Its
    arrays of pages are its layer's, and features (FeaturePages). ``model`` has the tables that the
    head shares. ``max_model_len`` is the daemon's.
    """

    feeds_last = stays = False

    def __init__(
        self,
        head: EagleHead | MTPHead,
        model: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        max_model_len: int,
    ) -> None:
        spec = head.partition.model.head
        assert backend.draft is not None and pool.of_draft is not None and pool.of_draft.tail is not None
        assert spec is not None
        self.layers = spec.taps
        """See FedPass."""
        self._weights: HeadWeights[EagleHead | MTPHead] = HeadWeights(head, model)
        self._kernel, self._longest = backend.draft.attention, max_model_len
        self._sampling = backend.sampling
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)
        self._kept = FeaturePages(pool.page_size, pool.num_pages, pool.of_draft.tail.rows)

    @property
    def weights(self) -> list[Array]:
        """See DraftPass."""
        return self._weights.all

    @property
    def specs(self) -> list[Any]:
        """See DraftPass."""
        return self._weights.specs

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """See DraftPass."""
        return cache.draft

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """See DraftPass."""
        return replace(cache, draft=pages)

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:
        """See DraftPass."""
        return self._kept.before(pages[-1], tables[self._group], positions)

    def feed(self, weights: list[Array], pages: Pages, batch: ModelInputBatch, hidden: Array, taps: Array) -> Pages:
        """See FedPass."""
        table = batch.table.of_layer(self._group, None)
        made = self._weights.head(weights).features(hidden, taps)
        features, kept = self._kept.shifted(pages[-1], made, batch.positions, table)
        pages, _, _ = self.run(weights, (*pages[:-1], kept), features, batch.token_ids, batch.positions, batch.table)
        return pages

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """See DraftPass."""
        head, (*layers, kept) = self._weights.head(weights), pages
        attention = PagedAttention(of_group(table, self._group), self._kernel, self._num_pages)
        step = StepContext(head.rotations(positions, self._longest), attention, table.cu_q_lens[-1])
        written, hidden = head(token_ids, positions, features, layers, step, self._weights.shared(weights))
        return cast(Pages, (*written, kept)), hidden, hidden

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """See DraftPass."""
        return self._weights.drafts(weights, hidden, inputs, key, self._sampling)
