"""A draft head with a layer of its own, as the programs of a step run it."""

from typing import cast

from jax import Array

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from engine.models.decoder import Decoder
from engine.models.heads.eagle_head import EagleHead
from engine.models.heads.mtp_head import MTPHead
from engine.models.rope import rotations
from engine.models.step_context import StepContext
from engine.step.backend import Backend
from engine.step.drafts.draft_pass import Pages, of_group
from engine.step.drafts.fed_head import FedHead
from engine.step.inputs.layout import ModelInputBatch
from engine.step.paged_attention import PagedAttention


class HeadPass(FedHead[EagleHead | MTPHead]):
    """A FedPass of a head, which FORWARD feeds all tokens of a step, drafts too.

    What DRAFT fed it of drafts was made of its own hidden states; now there are the model's. Its
    arrays of pages are its layer's, and features.
    """

    def __init__(
        self,
        head: EagleHead | MTPHead,
        model: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        max_model_len: int,
    ) -> None:
        super().__init__(head, model, backend, pool, max_model_len)
        spec = head.partition.model.head
        assert backend.draft is not None and spec is not None
        self.layers = spec.taps
        """See FedPass."""
        self._kernel = backend.draft.attention

    def feed(self, weights: list[Array], pages: Pages, batch: ModelInputBatch, hidden: Array, taps: Array) -> Pages:
        """See FedPass."""
        table = batch.table.of_layer(self._group, None)
        made = self._with(weights).features(hidden, taps)
        features, kept = self._kept.shifted(pages[-1], made, batch.positions, table)
        pages, _, _ = self.run(weights, (*pages[:-1], kept), features, batch.token_ids, batch.positions, batch.table)
        return pages

    def run(
        self, weights: list[Array], pages: Pages, features: Array, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array, Array]:
        """See DraftPass."""
        head, (*layers, kept) = self._with(weights), pages
        attention = PagedAttention(of_group(table, self._group), self._kernel, self._num_pages)
        turns = rotations(head.partition.model, positions, self._longest)
        step = StepContext(turns, attention, table.cu_q_lens[-1], rows=self._rows)
        written, hidden = head(token_ids, positions, features, layers, step, self._shared(weights))
        return cast(Pages, (*written, kept)), hidden, hidden
