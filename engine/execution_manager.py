"""The compiled functions of a step, one of each per bucket, all made before the first request."""

import os
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

from caching.attention import PageTable, locate, ragged_paged_attention, write_pages
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.paged_attention_cache import PagedAttentionCache
from engine.logprobs import compute_logprobs
from engine.model_io import FROM_SLOT, ModelInputBatch, StepLayout
from engine.models.decoder import Decoder, to_logits
from engine.progress import Progress
from engine.sampling_functions import SamplingFunctions

Forward = Callable[[list[Array], PagedAttentionCache, Array, Array], tuple[PagedAttentionCache, Array, Array, Array]]
"""(weights, cache, last_token, packed) -> (cache, logits f32[rows, vocab], hidden f[T, hidden], what the sampler reads).

The cache is donated."""

TakeHidden = Callable[[Array, NDArray[np.int32]], Array]
"""(hidden f[T, hidden], i32[PROMPT_BLOCK] places) -> f[PROMPT_BLOCK, hidden]."""

PROMPT_BLOCK = 64
"""Prompt tokens whose log-probabilities are computed at once: their logits are what a step has memory for anyway."""


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
        """The token counts that are compiled: powers of two, and the budget itself."""
        powers = [1 << bit for bit in range(self.max_num_batched_tokens.bit_length())]
        return sorted({*powers, self.max_num_batched_tokens})

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        return StepLayout(tokens, min(tokens, self.max_num_seqs), self.pages_per_seq)


class ExecutionManager:
    """Compiles ahead of time, through JAX's persistent cache, and hands out executables by bucket.

    Executables refuse other shapes than their own, so nothing can compile behind our back later.
    """

    def __init__(self, decoder: Decoder, shapes: StepShapes) -> None:
        self._graph, state = nnx.split(decoder)
        self.weights, self._structure = jax.tree.flatten(state)
        self._shapes = shapes
        self._scale = decoder.config.head_dim**-0.5
        self.sampling = SamplingFunctions(shapes.max_num_seqs, decoder.config.vocab_size)
        self._layouts = {tokens: shapes.layout(tokens) for tokens in shapes.buckets}
        self._forward: dict[int, Forward] = {}
        self._take_hidden: dict[int, TakeHidden] = {}
        self._head = decoder.head[...]
        self._prompt_logprobs: Callable[[Array, Array, NDArray[np.int32]], Array]

    def compile(self, report: Callable[[Progress], None]) -> None:
        """Compile every bucket and every sampler, as many at a time as there are cores: XLA leaves the GIL meanwhile."""
        jobs = list(self._jobs())
        report(Progress("compiling", 0, len(jobs), "functions"))
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            for done, future in enumerate(as_completed([pool.submit(job) for job in jobs]), start=1):
                future.result()
                report(Progress("compiling", done, len(jobs), "functions"))
        finally:  # after a fault or a signal nobody waits for what is left
            pool.shutdown(wait=False, cancel_futures=True)

    def layout_for(self, num_tokens: int) -> StepLayout:
        """The smallest bucket that holds a step."""
        return self._layouts[next(tokens for tokens in self._layouts if tokens >= num_tokens)]

    def forward(self, layout: StepLayout) -> Forward:
        """The compiled model step of a bucket."""
        return self._forward[layout.tokens]

    def prompt_logprobs(
        self, layout: StepLayout, hidden: Array, places: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> Array:
        """``compute_logprobs`` of PROMPT_BLOCK prompt tokens, from a step's hidden states at the places before them."""
        return self._prompt_logprobs(self._head, self._take_hidden[layout.tokens](hidden, places), token_ids)

    def _jobs(self) -> Iterator[Callable[[], None]]:
        for layout in self._layouts.values():
            yield partial(self._compile_forward, layout)
        yield from self.sampling.jobs(self._layouts.values())
        yield self._compile_prompt_logprobs

    def _compile_forward(self, layout: StepLayout) -> None:
        def step(
            weights: list[Array], cache: PagedAttentionCache, last_token: Array, packed: Array
        ) -> tuple[PagedAttentionCache, Array, Array, Array]:
            decoder = nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))
            cache, hidden, last = self._run(decoder, cache, last_token, layout.unpack(packed))
            return cache, decoder.logits(last), hidden, packed[: layout.sampling_size]

        weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.weights]
        cache = PagedAttentionCache.abstract(self._shapes.cache)
        packed = jax.ShapeDtypeStruct((layout.size,), np.int32)
        last_token = jax.ShapeDtypeStruct((self._shapes.max_num_seqs + 1,), np.int32)
        lowered = jax.jit(step, donate_argnums=1).lower(weights, cache, last_token, packed)
        self._forward[layout.tokens] = lowered.compile()

    def _run(
        self, decoder: Decoder, cache: PagedAttentionCache, last_token: Array, batch: ModelInputBatch
    ) -> tuple[PagedAttentionCache, Array, Array]:
        """The cache, the hidden states of all tokens, and those of each row's last."""
        token_ids, table = _with_last_tokens(batch, last_token), batch.table
        pages, offsets = locate(table, batch.positions, self._shapes.cache.page_size)

        def attend(
            kv_pages: Array | None, q: Array, k: Array, v: Array, window: int | None
        ) -> tuple[Array | None, Array]:
            assert kv_pages is not None
            written: tuple[Array, Array] = _attend(kv_pages, q, k, v, pages, offsets, table, self._scale, window)
            return written

        layers, hidden = decoder(token_ids, batch.positions, cache.layers, attend)
        last = hidden[jnp.maximum(table.cu_q_lens[1:] - 1, 0)]
        return PagedAttentionCache(tuple(layers)), hidden, last  # type: ignore[arg-type]

    def _compile_prompt_logprobs(self) -> None:
        def compute(head: Array, hidden: Array, token_ids: Array) -> Array:
            return compute_logprobs(to_logits(hidden, head), token_ids)

        size, dtype = self._head.shape[1], self._head.dtype
        places = jax.ShapeDtypeStruct((PROMPT_BLOCK,), np.int32)
        for tokens in self._layouts:
            hidden = jax.ShapeDtypeStruct((tokens, size), dtype)
            self._take_hidden[tokens] = jax.jit(lambda hidden, at: hidden[at]).lower(hidden, places).compile()
        block = jax.ShapeDtypeStruct((PROMPT_BLOCK, size), dtype)
        self._prompt_logprobs = jax.jit(compute).lower(self._head, block, places).compile()


@partial(jax.jit, static_argnames=("scale", "window"))
def _attend(
    kv_pages: Array,
    q: Array,
    k: Array,
    v: Array,
    pages: Array,
    offsets: Array,
    table: PageTable,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    """One layer's write and read of its pages; compiled into its caller, but traced once for all layers alike."""
    kv_pages = write_pages(kv_pages, k, v, pages, offsets)
    return kv_pages, ragged_paged_attention(q, kv_pages, table, sm_scale=scale, sliding_window=window)


def _with_last_tokens(batch: ModelInputBatch, last_token: Array) -> Array:
    """The step's token ids, those of decoding rows filled in from their slots."""
    rows = batch.slots.shape[0]
    head = batch.token_ids[:rows]
    head = jnp.where(head == FROM_SLOT, last_token[batch.slots], head)
    return jnp.concatenate([head, batch.token_ids[rows:]])
