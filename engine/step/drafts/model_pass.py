"""A draft model, as the programs of a step run it."""

from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.models.decoder import Decoder
from engine.models.step_context import StepContext
from engine.sampling.sampler import greedy
from engine.sampling.sampler_inputs import SamplerInputs
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages, of_group
from engine.step.paged_attention import PagedAttention
from engine.step.split_decoder import SplitDecoder
from engine.vocabulary import Vocabulary


class ModelPass:
    """A DraftPass of a model of its own, which is fed all tokens by programs of its own.

    ``max_model_len`` is the daemon's.
    """

    feeds_last, stays = True, False

    def __init__(
        self, decoder: Decoder, backend: Backend, pool: PagedAttentionCacheMetaData, max_model_len: int
    ) -> None:
        assert backend.draft is not None
        self._split, self._axis = SplitDecoder(decoder), decoder.partition.axis
        self._kernel, self._longest = backend.draft.attention, max_model_len
        self._sampling, self._rows = backend.sampling, backend.rows
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)

    @property
    def weights(self) -> list[Array]:
        """See DraftPass."""
        return self._split.weights

    def adopt_weights(self) -> None:
        """See DraftPass."""
        self._split.adopt_weights()

    @property
    def specs(self) -> list[Any]:
        """See DraftPass."""
        return self._split.weight_specs

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """See DraftPass."""
        return cache.draft

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """See DraftPass."""
        return replace(cache, draft=pages)

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:  # noqa: ARG002
        """See DraftPass: nothing."""
        return jnp.zeros((len(positions), 0), jnp.float32)

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """See DraftPass."""
        decoder = self._decoder(weights)
        attention = PagedAttention(of_group(table, self._group), self._kernel, self._num_pages)
        rotations, num_tokens = decoder.rotations(positions, self._longest), table.cu_q_lens[-1]
        step = StepContext(rotations, attention, num_tokens, positions=positions, rows=self._rows)
        written, hidden = decoder(token_ids, pages, step)
        return cast(Pages, tuple(written)), hidden, features

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """See DraftPass."""
        logits, vocabulary = self._decoder(weights).logits(hidden), Vocabulary(self._axis)
        return self._sampling.choose(
            inputs.rows,
            lambda: self._sampling.sample(logits, inputs, key, vocabulary),
            lambda: greedy(logits, vocabulary),
        )

    def _decoder(self, weights: list[Array]) -> Decoder:
        return cast(Decoder, self._split.decoder(self._split.state(weights)))
