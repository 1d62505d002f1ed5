"""The compiled functions of a step, one of each per bucket, all made before the first request."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.paged_attention_cache import PagedAttentionCache
from engine.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.progress import Progress
from engine.staged_compilation import StagedCompilation
from engine.step.backend import Backend
from engine.step.buckets import covering_buckets, sampling_rows, token_buckets
from engine.step.lowering import Hear, compile_lowered, hear_nothing, lower
from engine.step.model_io import StepLayout
from engine.step.model_step import ModelStep, scratch_bytes
from engine.step.sampling_functions import SamplingFunctions

Forward = Callable[
    [list[Array], PagedAttentionCache, Array, NDArray[np.int32]], tuple[PagedAttentionCache, Array, Array, Array]
]
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
    smallest_step: int = 1
    """Tokens below which a step takes no less time."""

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return pages_for(self.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> list[int]:
        """The token counts that are compiled, ascending."""
        return token_buckets(self.max_num_seqs, self.max_num_batched_tokens, self.smallest_step)

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        return StepLayout(tokens, sampling_rows(tokens, self.max_num_seqs), self.pages_per_seq)


class ExecutionManager:
    """Compiles ahead of time, through JAX's persistent cache, and hands out executables by bucket.

    Executables refuse other shapes than their own, so nothing can compile behind our back later.
    """

    def __init__(
        self, decoder: Decoder, shapes: StepShapes, backend: Backend, mesh: DeviceMesh, hear: Hear = hear_nothing
    ) -> None:
        self._step = ModelStep(decoder, backend, shapes.cache, shapes.max_num_seqs, mesh)
        self._mesh, self._hear = mesh, hear
        self.weights = self._step.weights
        self.sampling = SamplingFunctions(shapes.max_num_seqs, decoder.config.vocab_size, mesh, hear)
        self._layouts = {tokens: shapes.layout(tokens) for tokens in shapes.buckets}
        self._forward: dict[int, Forward] = {}
        self._head = [param.get_value() for param in decoder.head_and_scale]
        self._take_hidden: dict[int, TakeHidden] = {}
        self._prompt_logprobs: Callable[[list[Array], Array, NDArray[np.int32]], Array] | None = None
        self._scratch: list[int] = []
        self._ready: list[StepLayout] = []
        self._ready_tokens: list[int] = []
        self.staged = StagedCompilation([], self._publish)
        """What ``compile`` has left for later."""

    def compile(self, report: Callable[[Progress], None], *, staged: bool = False) -> None:
        """Compile every bucket and every sampler, as many at a time as there are cores: XLA leaves the GIL meanwhile.

        If ``staged``, only those that all steps can do with; the others are left to ``self.staged``.
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
        self.staged = StagedCompilation(list(self._jobs(buckets)), self._publish)

    @property
    def scratch_bytes(self) -> int:
        """The most that a compiled step takes beside weights and pages while it runs; 0 where the compiler does not say."""
        return max(self._scratch, default=0)

    def layout_for(self, num_tokens: int) -> StepLayout:
        """The smallest compiled bucket that holds a step."""
        return self._ready[bisect_left(self._ready_tokens, num_tokens)]

    def forward(self, layout: StepLayout) -> Forward:
        """The compiled model step of a bucket."""
        return self._forward[layout.tokens]

    def prompt_logprobs(
        self, layout: StepLayout, hidden: Array, places: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> Array:
        """``compute_logprobs`` of PROMPT_BLOCK prompt tokens, from a step's hidden states at the places before them."""
        assert self._prompt_logprobs is not None, "compile first"
        return self._prompt_logprobs(self._head, self._take_hidden[layout.tokens](hidden, places), token_ids)

    def _jobs(self, buckets: list[int]) -> Iterator[Callable[[], None]]:
        """What is not compiled of these buckets, a bucket after the other."""
        begun = set()
        for tokens in buckets:
            layout = self._layouts[tokens]
            if tokens not in self._forward:
                yield partial(self._compile_forward, layout)
            if layout.rows not in begun:
                begun.add(layout.rows)
                yield from self.sampling.jobs(layout)
        if self._prompt_logprobs is None:
            yield self._compile_prompt_logprobs

    def _publish(self) -> None:
        """Let steps use the buckets of which everything is compiled."""
        self._ready = [
            layout
            for layout in self._layouts.values()
            if layout.tokens in self._forward and self.sampling.is_compiled(layout)
        ]
        self._ready_tokens = [layout.tokens for layout in self._ready]

    def _compile_forward(self, layout: StepLayout) -> None:
        lowered = self._step.lower(layout)
        hidden = self._mesh.shapes(lowered.out_info[2])
        places = self._mesh.shapes(jax.ShapeDtypeStruct((PROMPT_BLOCK,), np.int32))
        take_hidden = lower(lambda hidden, at: hidden[at], hidden, places)
        self._take_hidden[layout.tokens] = compile_lowered(take_hidden, "take hidden", layout.tokens, self._hear)
        self._forward[layout.tokens] = compiled = compile_lowered(lowered, "step", layout.tokens, self._hear)
        self._scratch.append(scratch_bytes(compiled))

    def _compile_prompt_logprobs(self) -> None:
        lowered = self._step.lower_prompt_logprobs(PROMPT_BLOCK)
        self._prompt_logprobs = compile_lowered(lowered, "prompt logprobs", PROMPT_BLOCK, self._hear)
