"""The model's part of a step: from the packed integers of a bucket to the logits of each row's last token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.stages import Compiled, Lowered

from caching.attention import PageTable
from caching.paged_attention_cache import PagedAttentionCache
from engine.backend import RotaryAttention
from engine.lowering import lower
from engine.model_io import FROM_SLOT, ModelInputBatch, StepLayout
from engine.models.decoder import Decoder
from engine.models.rope import Rotation


class ModelStep:
    """Traces the steps of a decoder; its weights, and the cache, may be shapes alone."""

    def __init__(
        self, decoder: Decoder, attention: RotaryAttention, cache: PagedAttentionCache, max_num_seqs: int
    ) -> None:
        self._graph, state = nnx.split(decoder)
        self.weights: list[Array]
        self.weights, self._structure = jax.tree.flatten(state)
        self._attention = attention
        self._scale = decoder.config.head_dim**-0.5
        weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.weights]
        self._state = (weights, cache, jax.ShapeDtypeStruct((max_num_seqs + 1,), np.int32))

    def lower(self, layout: StepLayout, place: Callable[[Any], Any] | None = None) -> Lowered:
        """The step of a bucket: (weights, cache, last_token, packed) -> (cache, logits f32[rows, vocab], hidden f[T, hidden],
        what the sampler reads); the cache is donated. ``place`` says on what device the arguments lie.
        """

        def step(
            weights: list[Array], cache: PagedAttentionCache, last_token: Array, packed: Array
        ) -> tuple[PagedAttentionCache, Array, Array, Array]:
            decoder = nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))
            cache, hidden, last = self._run(decoder, cache, last_token, layout.unpack(packed))
            padding = ((0, layout.rows - layout.model_rows), (0, 0))
            return cache, jnp.pad(decoder.logits(last), padding), hidden, packed[: layout.sampling_size]

        arguments: Any = (*self._state, jax.ShapeDtypeStruct((layout.size,), np.int32))
        return lower(step, *(place(arguments) if place else arguments), donate=1)

    def _run(
        self, decoder: Decoder, cache: PagedAttentionCache, last_token: Array, batch: ModelInputBatch
    ) -> tuple[PagedAttentionCache, Array, Array]:
        """The cache, the hidden states of all tokens, and those of each row's last."""
        token_ids, table = _with_last_tokens(batch, last_token), batch.table

        def attend(
            kv_pages: Array | None, q: Array, k: Array, v: Array, rotation: Rotation, window: int | None
        ) -> tuple[Array | None, Array]:
            assert kv_pages is not None
            written: tuple[Array, Array] = _attend(
                self._attention, kv_pages, q, k, v, rotation, table, self._scale, window
            )
            return written

        layers, hidden = decoder(token_ids, batch.positions, cache.layers, attend)
        last = hidden[jnp.maximum(table.cu_q_lens[1:] - 1, 0)]
        return PagedAttentionCache(tuple(layers)), hidden, last  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("attention", "scale", "window"))
def _attend(
    attention: RotaryAttention,
    kv_pages: Array,
    q: Array,
    k: Array,
    v: Array,
    rotation: Rotation,
    table: PageTable,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    """One layer's attention; compiled into its caller, but traced once for all layers alike."""
    return attention(kv_pages, q, k, v, *rotation, table, sm_scale=scale, sliding_window=window)


def _with_last_tokens(batch: ModelInputBatch, last_token: Array) -> Array:
    """The step's token ids, those of decoding rows filled in from their slots."""
    rows = batch.slots.shape[0]
    head = batch.token_ids[:rows]
    head = jnp.where(head == FROM_SLOT, last_token[batch.slots], head)
    return jnp.concatenate([head, batch.token_ids[rows:]])


def scratch_bytes(compiled: Compiled) -> int:
    """What a compiled step takes beside weights and pages while it runs; 0 where the compiler does not say."""
    sizes: Any = compiled.memory_analysis()
    if sizes is None:
        return 0
    return int(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
