"""The programs of a draft model: it is fed what the model is fed, and drafts what rows verify.

Both run before FORWARD of the same step. Its pages so have every token that the model's have, up
to the last one that is fed, whether it was drafted, given or sampled.
"""

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Lowered

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.mesh import COPY, DeviceMesh
from engine.models.decoder import Decoder
from engine.models.step_context import StepContext
from engine.sampling.sampler import greedy, sample
from engine.sampling.sampler_inputs import SamplerInputs, pack_inputs
from engine.speculation.history import History
from engine.step.backend import CACHE, Backend
from engine.step.compilation import Program, lower
from engine.step.forward_programs import PagedAttention
from engine.step.layout import StepLayout
from engine.step.slot_state import SlotShapes, SlotState, read
from engine.step.split_decoder import SplitDecoder
from engine.vocabulary import Vocabulary

FEED_DRAFT_MODEL = "feed draft model"
"""(weights, cache, slots, history, packed) -> cache, which is donated: the draft model's pages have
the tokens that a step feeds. The arguments are those of FORWARD."""
DRAFT = "draft"
"""(weights, cache, slots, history, drafted i32[2, rows], key) -> (cache, history), both donated.

``drafted`` are the slots of rows and how many drafts each is to have, the most first; padding has
the dump slot and none. The rows' pages have room for their last token and all drafts, and the
draft model's then have them all."""

Pages = tuple[Array, ...]


class DraftPrograms:
    """A draft model's programs. Weights and cache may be abstract. Compiles nothing itself.

    ``max_model_len`` is the daemon's.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        slots: SlotShapes,
        mesh: DeviceMesh,
        max_model_len: int,
    ) -> None:
        assert backend.draft is not None
        self._split = SplitDecoder(decoder)
        self._kernel, self._longest = backend.draft.attention, max_model_len
        self._num_pages, self._group = pool.num_pages, pool.windows.index(None)
        self._num_slots, self._mesh = slots.num_slots, mesh
        self._state, self._specs = self._split.arguments(backend, pool, slots, mesh), self._split.specs

    @property
    def weights(self) -> list[Array]:
        """What the programs take first."""
        return self._split.weights

    def of(self, layout: StepLayout, rows: list[int]) -> list[Program]:
        """The programs of a bucket's steps, where DRAFT has one of so many ``rows``."""
        feed = Program(FEED_DRAFT_MODEL, layout.tokens, partial(self._lower_feed, layout))
        return [feed, *(Program(DRAFT, count, partial(self._lower_draft, count)) for count in rows)]

    def _lower_feed(self, layout: StepLayout) -> Lowered:
        def feed(
            weights: list[Array], cache: PagedAttentionCache, slots: SlotState, history: History, packed: Array
        ) -> PagedAttentionCache:
            _, batch, _ = layout.unpack(packed, slots, history)
            table = self._of_full_group(batch.table)
            pages, _ = self._run(self._decoder(weights), cache.draft, batch.token_ids, batch.positions, table)
            return replace(cache, draft=pages)

        packed = self._mesh.shapes(jax.ShapeDtypeStruct((layout.size,), np.int32))
        return lower(self._mesh.on_each(feed, (*self._specs, COPY), CACHE), *self._state, packed, donate=1)

    def _lower_draft(self, rows: int) -> Lowered:
        def draft(
            weights: list[Array],
            cache: PagedAttentionCache,
            slots: SlotState,
            history: History,
            drafted: Array,
            key: Array,
        ) -> tuple[PagedAttentionCache, History]:
            decoder, (of_rows, counts) = self._decoder(weights), drafted
            begins = read(slots.num_tokens.at[of_rows]) - read(history.num_wrong.at[of_rows])
            tables = slots.tables_of(of_rows)

            def feed_next(place: Array, state: tuple[Pages, History]) -> tuple[Pages, History]:
                """Feed the token at this place behind ``begins``, and draft the one behind it."""
                pages, history = state
                is_fed = (counts > 0) & (counts >= place)
                positions = jnp.where(is_fed, begins + place, 0)
                table = self._of_full_group(_of_single_tokens(tables, is_fed, positions))
                pages, hidden = self._run(decoder, pages, history.fed(of_rows, positions), positions, table)
                inputs = self._inputs(of_rows, is_fed, positions + 1, slots)
                drafts = jax.lax.cond(
                    place < counts[0],
                    lambda: self._sample(decoder, hidden, inputs, key),
                    lambda: jnp.zeros_like(of_rows),
                )
                slots_drafted = jnp.where(counts > place, of_rows, np.int32(inputs.dump_slot))
                return pages, history.drafted(slots_drafted, positions + 1, drafts)

            pages, history = jax.lax.fori_loop(jnp.int32(0), counts[0] + 1, feed_next, (cache.draft, history))
            return replace(cache, draft=pages), history

        drafted = self._mesh.shapes(jax.ShapeDtypeStruct((2, rows), np.int32))
        key = self._mesh.shapes(jax.eval_shape(lambda: jax.random.key(0)))
        on_each = self._mesh.on_each(draft, (*self._specs, COPY, COPY), (CACHE, COPY))
        return lower(on_each, *self._state, drafted, key, donate=(1, 3))

    def _inputs(self, of_rows: Array, samples: Array, positions: Array, slots: SlotState) -> SamplerInputs:
        """Of rows, bool[rows] whether they sample, the tokens at i32[rows] positions."""
        yes = samples.astype(jnp.int32)
        return SamplerInputs.unpack(pack_inputs(of_rows, yes, yes, positions, slots.parameters), self._num_slots)

    def _sample(self, decoder: Decoder, hidden: Array, inputs: SamplerInputs, key: Array) -> Array:
        """i32[rows] drafts, drawn from f[rows, hidden] with the random numbers that will draw the
        tokens in their places."""
        logits, vocabulary = decoder.logits(hidden), Vocabulary(self._mesh.axis)
        drafts: Array = jax.lax.cond(
            jnp.any(inputs.rows.temperature > 0),
            lambda: sample(logits, inputs.rows, key, vocabulary),
            lambda: greedy(logits, vocabulary),
        )
        return drafts

    def _decoder(self, weights: list[Array]) -> Decoder:
        return self._split.decoder(self._split.state(weights))

    def _of_full_group(self, table: PageTable) -> PageTable:
        """The model's tables -> that of its layers without windows, for all layers."""
        return PageTable(table.kv_lens, table.page_indices[self._group][None], table.cu_q_lens, table.num_seqs)

    def _run(
        self, decoder: Decoder, pages: Pages, token_ids: Array, positions: Array, table: PageTable
    ) -> tuple[Pages, Array]:
        """The pages with i32[T] tokens at i32[T] positions, and their hidden states f[T, hidden]."""
        attention = PagedAttention(table, self._kernel, self._num_pages)
        step = StepContext(decoder.rotations(positions, self._longest), attention, table.cu_q_lens[-1])
        written, hidden = decoder(token_ids, pages, step)
        return cast(Pages, tuple(written)), hidden


def _of_single_tokens(tables: Array, is_fed: Array, positions: Array) -> PageTable:
    """Of rows that are fed a token each, bool[rows] the leading ones, at i32[rows] positions."""
    count = jnp.sum(is_fed, dtype=jnp.int32)
    begins = jnp.arange(len(positions) + 1, dtype=jnp.int32)
    return PageTable(
        kv_lens=jnp.where(is_fed, positions + 1, 0),
        page_indices=tables,
        cu_q_lens=jnp.minimum(begins, count),
        num_seqs=count[None],
    )
