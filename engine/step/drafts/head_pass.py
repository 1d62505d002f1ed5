"""A draft head, as the programs of a step run it."""

from typing import Any, cast

import jax
from flax import nnx
from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from engine.models.decoder import Decoder
from engine.models.heads.draft_head import DraftHead
from engine.models.step_context import StepContext
from engine.models.weights.forms import Weight
from engine.sampling.sampler import greedy
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.feature_pages import FeaturePages
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages, of_group
from engine.step.layout import ModelInputBatch
from engine.step.paged_attention import PagedAttention
from engine.step.split_decoder import SplitDecoder, spec_of
from engine.vocabulary import Vocabulary


class HeadPass:
    """A DraftPass of a head, which FORWARD feeds all tokens of a step, drafts too.

    What DRAFT fed it of drafts was made of its own hidden states; now there are the model's. Its
    arrays of pages are its layer's, and features (FeaturePages). ``model`` has the tables that the
    head shares. ``max_model_len`` is the daemon's.
    """

    feeds_last = False

    def __init__(
        self,
        head: DraftHead,
        model: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        max_model_len: int,
    ) -> None:
        spec = head.partition.model.head
        assert backend.draft is not None and pool.of_draft is not None and pool.of_draft.tail is not None
        assert spec is not None
        self.layers = spec.taps
        """Of the model, those whose input the head reads."""
        self._split, self._model, self._axis = SplitDecoder(head), model, head.partition.axis
        self._kernel, self._longest = backend.draft.attention, max_model_len
        self._sampling = backend.sampling
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)
        self._kept = FeaturePages(pool.page_size, pool.num_pages, pool.of_draft.tail.rows)

    @property
    def weights(self) -> list[Array]:
        """See DraftPass; those of the model's tables, as they are now, come last."""
        return self._split.weights + jax.tree.leaves(self._shared_values)

    @property
    def specs(self) -> list[Any]:
        """See DraftPass."""
        return [spec_of(leaf.sharding) for leaf in self.weights]

    def features(self, pages: Pages, tables: Array, positions: Array) -> Array:
        """See DraftPass."""
        return self._kept.before(pages[-1], tables[self._group], positions)

    def feed(self, weights: list[Array], pages: Pages, batch: ModelInputBatch, hidden: Array, taps: Array) -> Pages:
        """The pages with the tokens of a step, of which the model has f[T, hidden] behind its last
        norm, and f[taps, T, hidden]."""
        table = batch.table.of_layer(self._group, None)
        made = self._head(weights).features(hidden, taps)
        features, kept = self._kept.shifted(pages[-1], made, batch.positions, table)
        pages, _, _ = self.run(weights, (*pages[:-1], kept), features, batch.token_ids, batch.positions, batch.table)
        return pages

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """See DraftPass."""
        head, (*layers, kept) = self._head(weights), pages
        attention = PagedAttention(of_group(table, self._group), self._kernel, self._num_pages)
        step = StepContext(head.rotations(positions, self._longest), attention, table.cu_q_lens[-1])
        written, hidden = head(token_ids, positions, features, layers, step, self._shared(weights))
        return cast(Pages, (*written, kept)), hidden, hidden

    def drafts(self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """See DraftPass."""
        head, vocabulary = self._head(weights), Vocabulary(self._axis)
        logits = head.logits(hidden, self._shared(weights))
        return self._sampling.choose(
            inputs.rows,
            lambda: self._sampling.sample(head.over_vocabulary(logits), inputs.rows, key, vocabulary),
            lambda: head.token_ids(greedy(logits, vocabulary)),
        )

    @property
    def _tables(self) -> list[nnx.Param[Weight]]:
        """The model's that the head reads."""
        head = self._split.whole
        assert isinstance(head, DraftHead)
        return head.shared(self._model)

    @property
    def _shared_values(self) -> list[Weight]:
        return [table.get_value() for table in self._tables]

    def _shared(self, weights: list[Array]) -> list[nnx.Param[Weight]]:
        """The model's tables that the head reads, with the arrays that are given of them."""
        structure = jax.tree.structure(self._shared_values)
        values = jax.tree.unflatten(structure, weights[len(self._split.weights) :])
        tables = (table.replace(value) for table, value in zip(self._tables, values, strict=True))
        return cast("list[nnx.Param[Weight]]", list(tables))

    def _head(self, weights: list[Array]) -> DraftHead:
        state = self._split.state(weights[: len(self._split.weights)])
        return cast(DraftHead, self._split.decoder(state))
