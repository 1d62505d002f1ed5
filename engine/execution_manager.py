"""The compiled functions of a step, one of each per bucket, all made before the first request."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from caching.attention import PageTable
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.paged_attention_cache import PagedAttentionCache
from engine.backend import RotaryAttention
from engine.buckets import covering_buckets, sampling_rows, token_buckets
from engine.model_io import FROM_SLOT, ModelInputBatch, StepLayout
from engine.models.decoder import Decoder
from engine.models.rope import Rotation
from engine.progress import Progress
from engine.sampler import SamplingVariant, sample
from engine.staged_compilation import StagedCompilation
from engine.token_masks import mask_logits, mask_words

Forward = Callable[
    [list[Array], PagedAttentionCache, Array, NDArray[np.int32]], tuple[PagedAttentionCache, Array, Array]
]
"""(weights, cache, last_token, packed) -> (cache, logits f32[rows, vocab], what the sampler reads of packed).

The cache is donated."""

Sample = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(logits, last_token, sampling, key) -> (ids i32[rows], last_token); last_token is donated."""

Mask = Callable[[Array, NDArray[np.int32]], Array]
"""``mask_logits``."""


@dataclass(frozen=True)
class StepShapes:
    """The sizes that every compiled function has in common."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cache: PagedAttentionCacheMetaData

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return pages_for(self.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> list[int]:
        """The token counts that are compiled, ascending."""
        return token_buckets(self.max_num_seqs, self.max_num_batched_tokens)

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        return StepLayout(tokens, sampling_rows(tokens, self.max_num_seqs), self.pages_per_seq)


class ExecutionManager:
    """Compiles ahead of time, through JAX's persistent cache, and hands out executables by bucket.

    Executables refuse other shapes than their own, so nothing can compile behind our back later.
    """

    def __init__(self, decoder: Decoder, shapes: StepShapes, attention: RotaryAttention) -> None:
        self._graph, state = nnx.split(decoder)
        self.weights, self._structure = jax.tree.flatten(state)
        self._shapes = shapes
        self._attention = attention
        self._scale = decoder.config.head_dim**-0.5
        self.vocab_size = decoder.config.vocab_size
        self._layouts = {tokens: shapes.layout(tokens) for tokens in shapes.buckets}
        self._forward: dict[int, Forward] = {}
        self._sample: dict[tuple[int, SamplingVariant], Sample] = {}
        self._mask: dict[int, Mask] = {}
        self._ready: list[StepLayout] = []
        self._ready_tokens: list[int] = []

    def compile(self, report: Callable[[Progress], None], *, staged: bool = False) -> StagedCompilation:
        """Compile every bucket and every sampler, as many at a time as there are cores: XLA leaves the GIL meanwhile.

        If ``staged``, only those that all steps can do with; the others are left to be compiled by what is returned.
        """
        buckets = list(self._layouts)
        first = covering_buckets(buckets) if staged else buckets
        jobs = list(self._jobs(first))
        report(Progress("compiling", 0, len(jobs), "functions"))
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            for done, future in enumerate(as_completed([pool.submit(job) for job in jobs]), start=1):
                future.result()
                report(Progress("compiling", done, len(jobs), "functions"))
        finally:  # after a fault or a signal nobody waits for what is left
            pool.shutdown(wait=False, cancel_futures=True)
        self._publish()
        return StagedCompilation(list(self._jobs(buckets)), self._publish)

    def layout_for(self, num_tokens: int) -> StepLayout:
        """The smallest compiled bucket that holds a step."""
        return self._ready[bisect_left(self._ready_tokens, num_tokens)]

    def forward(self, layout: StepLayout) -> Forward:
        """The compiled model step of a bucket."""
        return self._forward[layout.tokens]

    def sampler(self, layout: StepLayout, variant: SamplingVariant) -> Sample:
        """The compiled sampler for a bucket's rows."""
        return self._sample[layout.rows, variant]

    def mask(self, layout: StepLayout) -> Mask:
        """The compiled ``mask_logits`` for a bucket's rows."""
        return self._mask[layout.rows]

    def _jobs(self, buckets: list[int]) -> Iterator[Callable[[], None]]:
        """What is not compiled of these buckets, a bucket after the other."""
        samplers, masks = set(self._sample), set(self._mask)
        for tokens in buckets:
            layout = self._layouts[tokens]
            if tokens not in self._forward:
                yield partial(self._compile_forward, layout)
            for key in self._sampler_keys(layout):
                if key not in samplers:
                    samplers.add(key)
                    yield partial(self._compile_sampler, layout, key[1])
            if layout.rows not in masks:
                masks.add(layout.rows)
                yield partial(self._compile_mask, layout.rows)

    def _sampler_keys(self, layout: StepLayout) -> list[tuple[int, SamplingVariant]]:
        return [(layout.rows, variant) for variant in SamplingVariant]

    def _publish(self) -> None:
        """Let steps use the buckets of which everything is compiled."""
        self._ready = [layout for layout in self._layouts.values() if self._is_compiled(layout)]
        self._ready_tokens = [layout.tokens for layout in self._ready]

    def _is_compiled(self, layout: StepLayout) -> bool:
        samplers = all(key in self._sample for key in self._sampler_keys(layout))
        return samplers and layout.tokens in self._forward and layout.rows in self._mask

    def _compile_forward(self, layout: StepLayout) -> None:
        def step(
            weights: list[Array], cache: PagedAttentionCache, last_token: Array, packed: Array
        ) -> tuple[PagedAttentionCache, Array, Array]:
            decoder = nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))
            cache, logits = self._run(decoder, cache, last_token, layout.unpack(packed))
            padding = ((0, layout.rows - layout.model_rows), (0, 0))
            return cache, jnp.pad(logits, padding), packed[: layout.sampling_size]

        weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.weights]
        cache = PagedAttentionCache.abstract(self._shapes.cache)
        packed = jax.ShapeDtypeStruct((layout.size,), np.int32)
        lowered = jax.jit(step, donate_argnums=1).lower(weights, cache, self._last_token(), packed)
        self._forward[layout.tokens] = lowered.compile()

    def _run(
        self, decoder: Decoder, cache: PagedAttentionCache, last_token: Array, batch: ModelInputBatch
    ) -> tuple[PagedAttentionCache, Array]:
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
        return PagedAttentionCache(tuple(layers)), decoder.logits(last)  # type: ignore[arg-type]

    def _compile_sampler(self, layout: StepLayout, variant: SamplingVariant) -> None:
        def draw(logits: Array, last_token: Array, sampling: Array, key: Array) -> tuple[Array, Array]:
            slots, rows = layout.unpack_sampling(sampling)
            token_ids = sample(logits, rows, key, variant)
            return token_ids, last_token.at[slots].set(token_ids)

        logits = jax.ShapeDtypeStruct((layout.rows, self.vocab_size), jnp.float32)
        sampling = jax.ShapeDtypeStruct((layout.sampling_size,), np.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = jax.jit(draw, donate_argnums=1).lower(logits, self._last_token(), sampling, key)
        self._sample[layout.rows, variant] = lowered.compile()

    def _compile_mask(self, rows: int) -> None:
        logits = jax.ShapeDtypeStruct((rows, self.vocab_size), jnp.float32)
        masks = jax.ShapeDtypeStruct((rows, mask_words(self.vocab_size)), np.int32)
        self._mask[rows] = jax.jit(mask_logits).lower(logits, masks).compile()

    def _last_token(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._shapes.max_num_seqs + 1,), np.int32)


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
