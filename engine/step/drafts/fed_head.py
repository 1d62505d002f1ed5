"""What the passes of all kinds of draft heads have."""

from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import jax
from flax import nnx
from jax import Array

from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.models.decoder import Decoder
from engine.models.heads.draft_head import DraftHead
from engine.models.weights.forms import Weight
from engine.sampling.sampler import greedy
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.feature_pages import FeaturePages
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages
from engine.step.split_decoder import SplitDecoder, spec_of
from engine.vocabulary import Vocabulary

Head = TypeVar("Head", bound=DraftHead)


class FedHead(Generic[Head]):
    """The part of a FedPass that is the same for every head: weights, features, and drafts of hidden
    states.

    Its last array of pages are features (FeaturePages). ``model`` has the tables that the head
    shares. ``max_model_len`` is the daemon's.
    """

    feeds_last = stays = False

    def __init__(
        self, head: Head, model: Decoder, backend: Backend, pool: PagedAttentionCacheMetaData, max_model_len: int
    ) -> None:
        assert pool.of_draft is not None and pool.of_draft.tail is not None
        self._head, self._split, self._model = head, SplitDecoder(head), model
        self._sampling, self._rows, self._longest = backend.sampling, backend.rows, max_model_len
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)
        self._kept = FeaturePages(pool.page_size, pool.num_pages, pool.of_draft.tail.rows)

    @property
    def weights(self) -> list[Array]:
        """See DraftPass; those of the model's tables, as they are now, come last."""
        return self._split.weights + jax.tree.leaves(self._shared_values)

    def adopt_weights(self) -> None:
        """See DraftPass."""
        self._split.adopt_weights()

    @property
    def specs(self) -> list[Any]:
        """See DraftPass."""
        return [spec_of(leaf.sharding) for leaf in self.weights]

    def pages(self, cache: PagedAttentionCache) -> Pages:
        """See DraftPass."""
        return cache.draft

    def cache_with(self, cache: PagedAttentionCache, pages: Pages) -> PagedAttentionCache:
        """See DraftPass."""
        return replace(cache, draft=pages)

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:
        """See DraftPass."""
        return self._kept.before(pages[-1], tables[self._group], positions)

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """See DraftPass."""
        head, vocabulary = self._with(weights), Vocabulary(self._head.partition.axis)
        logits = head.logits(hidden, self._shared(weights))
        return self._sampling.choose(
            inputs.rows,
            lambda: self._sampling.sample(head.over_vocabulary(logits, hidden), inputs, key, vocabulary),
            lambda: head.token_ids(greedy(logits, vocabulary)),
        )

    def _with(self, weights: list[Array]) -> Head:
        """The head with the arrays that are given."""
        state = self._split.state(weights[: len(self._split.weights)])
        return cast(Head, self._split.decoder(state))

    def _shared(self, weights: list[Array]) -> list[nnx.Param[Weight]]:
        """The model's tables that the head reads, with the arrays that are given of them."""
        structure = jax.tree.structure(self._shared_values)
        values = jax.tree.unflatten(structure, weights[len(self._split.weights) :])
        tables = (table.replace(value) for table, value in zip(self._tables, values, strict=True))
        return cast("list[nnx.Param[Weight]]", list(tables))

    @property
    def _tables(self) -> list[nnx.Param[Weight]]:
        return self._head.shared(self._model)

    @property
    def _shared_values(self) -> list[Weight]:
        return [table.get_value() for table in self._tables]
