"""An assistant, which reads the model's pages, as the programs of a step run it."""

from dataclasses import replace
from typing import cast

import jax.numpy as jnp
from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.models.decoder import Decoder
from engine.models.heads.assistant import Assistant
from engine.models.layers.cache_layout import cache_layout
from engine.models.layers.self_attention import self_attention
from engine.models.rope import rotations
from engine.models.step_context import Place, StepContext
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages
from engine.step.drafts.fed_head import FedHead
from engine.step.inputs.layout import ModelInputBatch
from engine.step.paged_attention import PagedAttention


class AssistantPass(FedHead[Assistant]):
    """A FedPass that has nothing of its own in pages but features: the model's hidden states, which
    FORWARD writes.

    It makes all drafts of a row at the position of its last token, from the keys and values of the
    tokens before: those are in the model's pages, and all are right.
    """

    stays, layers = True, ()

    def __init__(
        self,
        assistant: Assistant,
        model: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        max_model_len: int,
    ) -> None:
        super().__init__(assistant, model, backend, pool, max_model_len)
        self._kernel = backend.attention
        layout = cache_layout(model.partition.model.blocks)
        sources = (self_attention(block).kv_source for block in assistant.partition.model.blocks)
        self._read = [layout.in_pages(source) for source in sources if source is not None]
        self._arrays = [layout.array(place, stacked=pool.stacked) for place in self._read]
        self._stacked = pool.stacked

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """See DraftPass: the model's, which it only reads, go through its kernels."""
        return cache.layers + cache.draft

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """See DraftPass."""
        return replace(cache, layers=pages[:-1], draft=pages[-1:])

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
        assistant, (*layers, kept) = self._with(weights), pages
        before = replace(table, kv_lens=jnp.maximum(table.kv_lens - 1, 0))
        attention = PagedAttention(before, self._kernel, self._num_pages)
        turns = rotations(assistant.partition.model, positions, self._longest)
        step = StepContext(turns, attention, table.cu_q_lens[-1], rows=self._rows)
        places = [Place(place.group, jnp.int32(place.layer) if self._stacked else None) for place in self._read]
        found, shared = list(zip(self._arrays, places, strict=True)), self._shared(weights)
        read, hidden, features = assistant(token_ids, features, layers, found, step, shared)
        return cast(Pages, (*read, kept)), hidden, features
