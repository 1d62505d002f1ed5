"""The model's programs: from a bucket's packed integers to the logits to sample from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Lowered

from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from caching.state.table import StateTable
from engine.adapters.slot_arrays import SlotArrays
from engine.devices.mesh import COPY, LOGITS, DeviceMesh
from engine.models.adapters.adapted import AdapterRows
from engine.models.decoder import Decoder
from engine.models.decoder import logits as to_logits
from engine.models.linear import look_up, skips_zeros, zero_behind
from engine.models.step_context import StepContext
from engine.models.weights.forms import Weight
from engine.speculation.history import DRAFT_HEADER, PIECE, PIECE_HEADER, History, earlier_width
from engine.step.backend import CACHE, Backend
from engine.step.compilation import Program, lower
from engine.step.drafts.draft_pass import FedPass
from engine.step.inputs.layout import ModelInputBatch, StepLayout
from engine.step.inputs.prompt_logprobs import PROMPT_BLOCK
from engine.step.inputs.slot_state import SEPARATE, SlotShapes, SlotState
from engine.step.paged_attention import PagedAttention
from engine.step.split_decoder import SplitDecoder, shape_of, spec_of
from engine.vocabulary import Vocabulary

FORWARD = "step"
"""(weights, cache, slots, fed, packed) -> (cache, slots, logits f32[rows, vocab],
hidden f[T, hidden], packed SamplerInputs). ``cache`` and the SlotState ``slots`` are donated. A
draft head is fed the same tokens, and its weights are behind the model's."""
ADAPTED_FORWARD = "step with adapters"
"""FORWARD with the arrays of SlotArrays as its last argument, for a step in which some row has an
adapter."""
WRITE_HISTORY = "write history"
"""(history, piece) -> history, a History, which is donated; see ``History.after``. There is one of
PIECE tokens, and one of the room for earlier texts."""
WRITE_EXPECTED = "write expected drafts"
"""(history, rows) -> history, which is donated; see ``History.with_expected``."""
WRITE_SLOTS = "write slots"
"""(slots, changes i32[SEPARATE.size]) -> slots, a SlotState, which is donated."""
TAKE_HIDDEN = "take hidden"
"""(hidden f[T, hidden], indices i32[PROMPT_BLOCK]) -> f[PROMPT_BLOCK, hidden]."""
PROMPT_LOGPROBS = "prompt logprobs"
"""(head, hidden f[PROMPT_BLOCK, hidden], token ids i32[PROMPT_BLOCK]) -> ``compute_logprobs``."""
ADAPTED_PROMPT_LOGPROBS = "prompt logprobs with adapters"
"""PROMPT_LOGPROBS with the head's arrays of SlotArrays, and i32[PROMPT_BLOCK] each token's slot."""


class ForwardPrograms:
    """A decoder's programs. Weights and cache may be abstract. Compiles nothing itself.

    ``max_model_len``, by default the model's, decides between the factors of longrope.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        pool: PagedAttentionCacheMetaData,
        slots: SlotShapes,
        mesh: DeviceMesh,
        max_model_len: int | None = None,
        adapters: SlotArrays | None = None,
        head: FedPass | None = None,
    ) -> None:
        self._decoder, self._head = decoder, head
        self._split = SplitDecoder(decoder)
        self._kernel, self._rows, self._smallest_step = backend.attention, backend.rows, backend.smallest_step
        self._unpack, self._compute_logprobs = backend.unpack, backend.sampling.compute_logprobs
        self._num_pages, self._num_slots = pool.num_pages, pool.states.num_slots if pool.states else 0
        self._longest, self._earlier_width = max_model_len, earlier_width(slots.num_earlier)
        self._mesh, self._adapters = mesh, adapters
        weights, *state = self._split.arguments(backend, pool, slots, mesh)
        of_weights, *specs = self._split.specs
        if head is not None:
            weights, of_weights = weights + list(map(shape_of, head.weights)), of_weights + head.specs
        self._state = weights, *state
        self._slots: SlotState = self._state[2]
        self._fed: Array | History = self._state[3]
        self._specs = (of_weights, *specs, COPY)

    @property
    def weights(self) -> list[Array]:
        """What the programs take first."""
        return self._split.weights if self._head is None else self._split.weights + self._head.weights

    def adopt_weights(self) -> None:
        """Use the arrays that the decoder has now, of the same shapes, in the steps to come; DraftPrograms does so for a draft head."""
        self._split.adopt_weights()

    @property
    def head(self) -> tuple[Weight, Array | None]:
        """The weights that PROMPT_LOGPROBS reads: the table of logits, and their bias if they have one."""
        bias = self._decoder.lm_head_bias
        return self._decoder.head, None if bias is None else bias.get_value()

    def of(self, layout: StepLayout) -> list[Program]:
        """The programs of a bucket."""
        adapters = self._adapters
        adapted = (
            [] if adapters is None else [Program(ADAPTED_FORWARD, layout.tokens, partial(self.lower, layout, adapters))]
        )
        return [
            Program(FORWARD, layout.tokens, partial(self.lower, layout)),
            *adapted,
            Program(TAKE_HIDDEN, layout.tokens, partial(self._lower_take_hidden, layout)),
        ]

    def writers(self) -> list[Program]:
        """WRITE_SLOTS, and where there is a history WRITE_HISTORY and WRITE_EXPECTED."""
        slots = Program(WRITE_SLOTS, SEPARATE.entries, self._lower_write_slots)
        if not isinstance(self._fed, History):
            return [slots]
        size, lower_write = self._fed.ids.shape[0], self._lower_write_history
        expected = size - 1, DRAFT_HEADER + self._fed.num_drafts
        return [
            slots,
            *(
                Program(WRITE_HISTORY, count, partial(lower_write, History.after, (PIECE_HEADER + count,)))
                for count in sorted({PIECE, self._earlier_width} - {0})
            ),
            Program(WRITE_EXPECTED, size, partial(lower_write, History.with_expected, expected)),
        ]

    def prompt_logprobs(self, count: int) -> list[Program]:
        """PROMPT_LOGPROBS of ``count`` tokens, and ADAPTED_PROMPT_LOGPROBS if heads have adapters."""
        programs = [Program(PROMPT_LOGPROBS, count, partial(self._lower_prompt_logprobs, count))]
        if self._adapters is not None and self._adapters.head is not None:
            lower_adapted = partial(self._lower_prompt_logprobs, count, self._adapters)
            programs.append(Program(ADAPTED_PROMPT_LOGPROBS, count, lower_adapted))
        return programs

    def lower(self, layout: StepLayout, adapters: SlotArrays | None = None) -> Lowered:
        """FORWARD of a bucket, or ADAPTED_FORWARD. Its logits are sharded by vocabulary."""

        def step(
            weights: list[Array],
            cache: PagedAttentionCache,
            slots: SlotState,
            fed: Array | History,
            packed: Array,
            arrays: list[Array] | None = None,
        ) -> tuple[PagedAttentionCache, SlotState, Array, Array, Array]:
            count = len(self._split.weights)
            state, rows = self._split.state(weights[:count]), None
            slots, batch, sampling = self._unpack(layout, packed, slots, fed)
            if adapters is not None and arrays is not None:
                state = adapters.adapted(state, arrays)
                rows = AdapterRows(layout.unpack_adapters(packed, batch.table), adapters.sizes.max_loras)
            states = layout.unpack_states(packed, batch.table, self._num_slots)
            decoder: Decoder = self._split.decoder(state)
            cache, hidden, sampled = self._run(decoder, cache, batch, states, rows, weights[count:])
            return cache, slots, self._logits(decoder, layout, batch, sampled, rows), hidden, sampling

        packed = self._mesh.shapes(jax.ShapeDtypeStruct((layout.size,), np.int32))
        arrays, specs = ((), ()) if adapters is None else ((adapters.shapes,), (adapters.specs,))
        on_each = self._mesh.on_each(step, (*self._specs, *specs), (CACHE, COPY, LOGITS, COPY, COPY))
        return lower(on_each, *self._state, packed, *arrays, donate=(1, 2))

    def _lower_write_slots(self) -> Lowered:
        changes = self._mesh.shapes(jax.ShapeDtypeStruct((SEPARATE.size,), np.int32))
        on_each = self._mesh.on_each(lambda slots, changes: slots.after(SEPARATE, changes), (COPY, COPY), COPY)
        return lower(on_each, self._slots, changes, donate=0)

    def _lower_write_history(self, change: Callable[[History, Array], History], shape: tuple[int, ...]) -> Lowered:
        written = self._mesh.shapes(jax.ShapeDtypeStruct(shape, np.int32))
        return lower(self._mesh.on_each(change, (COPY, COPY), COPY), self._fed, written, donate=0)

    def _lower_take_hidden(self, layout: StepLayout) -> Lowered:
        hidden = self._mesh.shapes(jax.ShapeDtypeStruct((layout.tokens, *self._hidden.shape), self._hidden.dtype))
        places = self._mesh.shapes(jax.ShapeDtypeStruct((PROMPT_BLOCK,), np.int32))
        return lower(lambda hidden, at: hidden[at], hidden, places)

    def _lower_prompt_logprobs(self, count: int, adapters: SlotArrays | None = None) -> Lowered:
        partition = self._decoder.partition

        def compute(
            head: tuple[Weight, Array | None],
            hidden: Array,
            token_ids: Array,
            arrays: list[Array] | None = None,
            slots: Array | None = None,
        ) -> Array:
            (table, bias), rows = head, None
            if adapters is not None and arrays is not None and slots is not None:
                table = adapters.adapted_head(table, arrays)
                rows = AdapterRows(slots, adapters.sizes.max_loras)
            logits = to_logits(hidden, table, partition, rows, bias)
            return self._compute_logprobs(logits, token_ids, Vocabulary(self._mesh.axis), partition.model.vocab_size)

        head = jax.tree.map(shape_of, self.head)
        hidden = jax.ShapeDtypeStruct((count, *self._hidden.shape), self._hidden.dtype)
        token_ids = jax.ShapeDtypeStruct((count,), np.int32)
        arrays: list[Any] = []
        specs: list[Any] = []
        if adapters is not None:
            arrays = [adapters.of_head(adapters.shapes), self._mesh.shapes(token_ids)]
            specs = [adapters.of_head(adapters.specs), COPY]
        of_head = jax.tree.map(lambda leaf: spec_of(leaf.sharding), head)
        on_each = self._mesh.on_each(compute, (of_head, COPY, COPY, *specs), COPY)
        return lower(on_each, head, *self._mesh.shapes((hidden, token_ids)), *arrays)

    @cached_property
    def _hidden(self) -> jax.ShapeDtypeStruct:
        """A token's hidden state, f[hidden]."""
        one = jax.eval_shape(look_up, self._decoder.embedding, jax.ShapeDtypeStruct((1,), np.int32))
        return jax.ShapeDtypeStruct(one.shape[1:], one.dtype)

    def _logits(
        self, decoder: Decoder, layout: StepLayout, batch: ModelInputBatch, sampled: Array, adapters: AdapterRows | None
    ) -> Array:
        """f32[rows, vocab] from f[model_rows, hidden]; zeros behind the rows that need them."""
        if skips_zeros(decoder.head):
            counts, sampled = [layout.model_rows], zero_behind(sampled, batch.num_logits, decoder.head)
        else:
            counts = layout.logit_rows(self._smallest_step)

        def of_first(count: int) -> Array:
            rows = None if adapters is None else AdapterRows(adapters.slots[batch.sampled[:count]], adapters.num_slots)
            found = decoder.logits(sampled[:count], rows)
            if decoder.lm_head_bias is not None:
                found = zero_behind(found, batch.num_logits, decoder.head)
            return jnp.pad(found, ((0, layout.rows - count), (0, 0)))

        if len(counts) == 1:
            return of_first(counts[0])
        shape = jax.eval_shape(partial(of_first, counts[-1]))
        branch = jnp.sum(batch.num_logits > jnp.array(counts[:-1], jnp.int32), dtype=jnp.int32)
        computed: Array = jax.lax.switch(
            branch, [lambda: jnp.zeros(shape.shape, shape.dtype), *(partial(of_first, count) for count in counts[1:])]
        )
        return computed

    def _run(
        self,
        decoder: Decoder,
        cache: PagedAttentionCache,
        batch: ModelInputBatch,
        states: StateTable | None,
        adapters: AdapterRows | None,
        of_head: list[Array],
    ) -> tuple[PagedAttentionCache, Array, Array]:
        """The cache, the hidden states of all tokens, and of those that logits are computed of."""
        attention = PagedAttention(batch.table, self._kernel, self._num_pages)
        rotations = decoder.rotations(batch.positions, self._longest)
        step = StepContext(
            rotations, attention, batch.table.cu_q_lens[-1], states, adapters, batch.positions, self._rows
        )
        layers = () if self._head is None else self._head.layers
        caches, hidden, taps = decoder.tapped(batch.token_ids, cache.caches, step, layers)
        cache = cache.with_caches(caches)
        if self._head is not None:
            cache = replace(cache, draft=self._head.feed(of_head, cache.draft, batch, hidden, taps))
        return cache, hidden, hidden[batch.sampled]
