"""The programs that draft what rows verify: FEED_DRAFT_MODEL and DRAFT, which run before FORWARD.

A draft model is fed what the model is fed. Its pages so have every token that the model's have, up
to the last one that is fed, whether it was drafted, given or sampled. FORWARD feeds a draft head.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Lowered

from caching.attention.spec import PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.devices.mesh import COPY, DeviceMesh
from engine.sampling.sampler_inputs import SamplerInputs, pack_inputs
from engine.speculation.history import History
from engine.step.backend import CACHE, Backend
from engine.step.compilation import Program, lower
from engine.step.drafts.draft_pass import DraftPass, Pages
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes, SlotState, read
from engine.step.split_decoder import shape_of, state_arguments

FEED_DRAFT_MODEL = "feed draft model"
"""(weights, cache, slots, history, packed) -> cache, which is donated: the draft model's pages have
the tokens that a step feeds. The arguments are those of FORWARD."""
DRAFT = "draft"
"""(weights, cache, slots, history, drafted i32[2, rows], key) -> (cache, history, drafts i32[rows,
most drafts]); cache and history are donated.

``drafted`` are the slots of rows and how many drafts each is to have, the most first; padding has
the dump slot and none. The rows' pages have room for their last token and all drafts, and a draft
model's then have them all, a draft head's all but the last draft. The drafts are NO_DRAFT behind a row's
last."""


class DraftPrograms:
    """The programs of a draft model or a draft head. Weights and cache may be abstract. Compiles
    nothing itself."""

    def __init__(
        self,
        one_pass: DraftPass,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        slots: SlotShapes,
        mesh: DeviceMesh,
    ) -> None:
        self._pass, self._num_slots, self._mesh = one_pass, slots.num_slots, mesh
        weights = [shape_of(leaf) for leaf in one_pass.weights]
        self._state = weights, *state_arguments(backend, pool, slots, mesh)
        self._specs = one_pass.specs, CACHE, COPY, COPY

    @property
    def weights(self) -> list[Array]:
        """What the programs take first."""
        return self._pass.weights

    def adopt_weights(self) -> None:
        """See DraftPass."""
        self._pass.adopt_weights()

    @property
    def feeds(self) -> bool:
        """Whether there is FEED_DRAFT_MODEL."""
        return self._pass.feeds_last

    def of(self, layout: StepLayout, rows: list[int]) -> list[Program]:
        """The programs of a bucket's steps, where DRAFT has one of so many ``rows``."""
        feed = Program(FEED_DRAFT_MODEL, layout.tokens, partial(self._lower_feed, layout))
        drafts = [Program(DRAFT, count, partial(self._lower_draft, count)) for count in rows]
        return [feed, *drafts] if self.feeds else drafts

    def _lower_feed(self, layout: StepLayout) -> Lowered:
        def feed(
            weights: list[Array], cache: PagedAttentionCache, slots: SlotState, history: History, packed: Array
        ) -> PagedAttentionCache:
            _, batch, _ = layout.unpack(packed, slots, history)
            nothing = jnp.zeros((len(batch.token_ids), 0), jnp.float32)
            tokens = nothing, batch.token_ids, batch.positions, batch.table
            pages, _, _ = self._pass.run(weights, self._pass.pages(cache), *tokens)
            return self._pass.cache_with(cache, pages)

        packed = self._mesh.shapes(jax.ShapeDtypeStruct((layout.size,), np.int32))
        return lower(self._mesh.on_each(feed, (*self._specs, COPY), CACHE), *self._state, packed, donate=1)

    def _lower_draft(self, rows: int) -> Lowered:
        one_pass, more = self._pass, int(self._pass.feeds_last)

        def draft(
            weights: list[Array],
            cache: PagedAttentionCache,
            slots: SlotState,
            history: History,
            drafted: Array,
            key: Array,
        ) -> tuple[PagedAttentionCache, History, Array]:
            of_rows, counts = drafted
            begins = read(slots.num_tokens.at[of_rows]) - read(history.num_wrong.at[of_rows])
            tables = slots.tables_of(of_rows)

            def feed_next(place: Array, state: tuple[Pages, Array, History]) -> tuple[Pages, Array, History]:
                """Feed the token at this place behind ``begins``, and draft the one behind it."""
                pages, features, history = state
                is_fed = (counts > 0) & (counts + more > place)
                positions = jnp.where(is_fed, begins + place, 0)
                token_ids = history.fed(of_rows, positions)
                seen = jnp.where(is_fed, begins, 0) if one_pass.stays else positions
                table = _of_single_tokens(tables, is_fed, seen)
                pages, hidden, features = one_pass.run(weights, pages, features, token_ids, seen, table)
                inputs = self._inputs(of_rows, is_fed, positions + 1, slots)
                drafts = jax.lax.cond(
                    place < counts[0],
                    lambda: one_pass.drafts(weights, hidden, inputs, key),
                    lambda: jnp.zeros_like(of_rows),
                )
                slots_drafted = jnp.where(counts > place, of_rows, np.int32(inputs.dump_slot))
                return pages, features, history.drafted(slots_drafted, positions + 1, drafts)

            pages = one_pass.pages(cache)
            state, count = (pages, one_pass.features(pages, tables, begins), history), counts[0] + more
            pages, _, history = jax.lax.fori_loop(jnp.int32(0), count, feed_next, state)
            drafts = history.drafts(of_rows, begins + 1, counts)
            return one_pass.cache_with(cache, pages), history, drafts

        drafted = self._mesh.shapes(jax.ShapeDtypeStruct((2, rows), np.int32))
        key = self._mesh.shapes(jax.eval_shape(lambda: jax.random.key(0)))
        on_each = self._mesh.on_each(draft, (*self._specs, COPY, COPY), (CACHE, COPY, COPY))
        return lower(on_each, *self._state, drafted, key, donate=(1, 3))

    def _inputs(self, of_rows: Array, samples: Array, positions: Array, slots: SlotState) -> SamplerInputs:
        """Of rows, bool[rows] whether they sample, the tokens at i32[rows] positions."""
        yes = samples.astype(jnp.int32)
        return SamplerInputs.unpack(pack_inputs(of_rows, yes, yes, positions, slots.parameters), self._num_slots)


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
