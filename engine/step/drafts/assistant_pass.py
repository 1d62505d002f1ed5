"""An assistant, which reads the model's pages, as the programs of a step run it."""

from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.models.decoder import Decoder
from engine.models.heads.assistant import Assistant
from engine.models.layers.cache_layout import cache_layout
from engine.models.layers.self_attention import self_attention
from engine.models.step_context import Place, StepContext
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.feature_pages import FeaturePages
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages
from engine.step.drafts.head_weights import HeadWeights
from engine.step.layout import ModelInputBatch
from engine.step.paged_attention import PagedAttention


class AssistantPass:
    """A FedPass that has nothing of its own in pages but features (FeaturePages): the model's hidden
    states, which FORWARD writes.

    It makes all drafts of a row at the position of its last token, from the keys and values of the
    tokens before: those are in the model's pages, and all are right. ``model`` has the embedding.
    ``max_model_len`` is the daemon's.
    """

    feeds_last, stays, layers = False, True, ()

    def __init__(
        self,
        assistant: Assistant,
        model: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        max_model_len: int,
    ) -> None:
        assert pool.of_draft is not None and pool.of_draft.tail is not None
        self._weights = HeadWeights(assistant, model)
        self._kernel, self._longest = backend.attention, max_model_len
        self._sampling = backend.sampling
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)
        self._kept = FeaturePages(pool.page_size, pool.num_pages, pool.of_draft.tail.rows)
        layout = cache_layout(model.partition.model.blocks)
        sources = (self_attention(block).kv_source for block in assistant.partition.model.blocks)
        self._read = [layout.places[source] for source in sources if source is not None]
        self._arrays = [layout.array(place, stacked=pool.stacked) for place in self._read]
        self._stacked = pool.stacked

    @property
    def weights(self) -> list[Array]:
        """See DraftPass."""
        return self._weights.all

    @property
    def specs(self) -> list[Any]:
        """See DraftPass."""
        return self._weights.specs

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """See DraftPass: the model's, which it only reads, go through its kernels."""
        return cache.layers + cache.draft

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """See DraftPass."""
        return replace(cache, layers=pages[:-1], draft=pages[-1:])

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:
        """See DraftPass."""
        return self._kept.before(pages[-1], tables[self._group], positions)

    def feed(
        self,
        weights: list[Array],  # noqa: ARG002 - as of a HeadPass
        pages: Pages,
        batch: ModelInputBatch,
        hidden: Array,
        taps: Array,  # noqa: ARG002 - as of a HeadPass
    ) -> Pages:
        """See FedPass."""
        (kept,), table = pages, batch.table.of_layer(self._group, None)
        return (self._kept.after(kept, hidden, batch.positions, table),)

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """See DraftPass; the pages stay as they are."""
        assistant, (*layers, kept) = self._weights.head(weights), pages
        before = replace(table, kv_lens=jnp.maximum(table.kv_lens - 1, 0))
        attention = PagedAttention(before, self._kernel, self._num_pages)
        step = StepContext(assistant.rotations(positions, self._longest), attention, table.cu_q_lens[-1])
        places = [Place(place.group, jnp.int32(place.layer) if self._stacked else None) for place in self._read]
        found, shared = list(zip(self._arrays, places, strict=True)), self._weights.shared(weights)
        read, hidden, features = assistant(token_ids, features, layers, found, step, shared)
        return cast(Pages, (*read, kept)), hidden, features

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """See DraftPass."""
        return self._weights.drafts(weights, hidden, inputs, key, self._sampling)
