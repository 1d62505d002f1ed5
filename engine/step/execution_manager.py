"""A table of a step's executables, by program and size, compiled before the first request."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from jax import Array

from caching.cores import usable_cores
from caching.paged_attention_cache import PagedAttentionCache
from engine.adapters.slot_arrays import slot_arrays
from engine.devices.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.heads.draft_head import DraftHead
from engine.models.weights.forms import Weight
from engine.models.weights.store import AnyDecoder
from engine.progress import Progress
from engine.step.backend import Backend
from engine.step.compilation import Compilation, OnCompiled, Program, StagedCompilation, compile_program, scratch_bytes
from engine.step.drafts.draft_programs import DRAFT, FEED_DRAFT_MODEL, DraftPrograms
from engine.step.drafts.fed_pass import fed_pass
from engine.step.drafts.model_pass import ModelPass
from engine.step.executables.stored import Stored, StoredExecutables
from engine.step.forward_programs import ADAPTED_FORWARD, FORWARD, ForwardPrograms
from engine.step.host_cache.page_copies import Copied, CopyPrograms, copied_kinds
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.prompt_logprobs import PROMPT_BLOCK
from engine.step.sampling_programs import SamplingPrograms
from engine.step.step_shapes import StepShapes, covering_buckets


class ExecutionManager:
    """Compiles ahead of time, through JAX's persistent cache, or reads what an earlier start has
    compiled, and returns executables by bucket.

    Executables reject other shapes than their own, so nothing is compiled implicitly later.
    """

    def __init__(
        self,
        decoder: Decoder,
        shapes: StepShapes,
        backend: Backend,
        mesh: DeviceMesh,
        on_compiled: OnCompiled = lambda _: None,
        *,
        draft: AnyDecoder | None = None,
        stored: StoredExecutables | None = None,
    ) -> None:
        """``draft`` is the decoder of the draft model, or the draft head, if there is one. What
        ``stored`` has is not compiled, and what it lacks is added to it."""
        self.shapes, self.mesh, self.decoder = shapes, mesh, decoder
        self.new_cache: Callable[[], PagedAttentionCache] = backend.allocator(shapes.cache, mesh)
        """Allocates zeroed pages; raises jax.errors.JaxRuntimeError if out of memory."""
        self.sampling = SamplingPrograms(
            shapes.slots,
            decoder.partition.model.vocab_size,
            mesh,
            shapes.speculation,
            backend.sampling,
            backend.verify,
        )
        self.adapters = None if shapes.adapters is None else slot_arrays(decoder, shapes.adapters, mesh)
        """The slots of adapters, if there are such."""
        sizes = backend, shapes.cache, shapes.max_model_len
        head = fed_pass(draft, decoder, *sizes) if isinstance(draft, DraftHead) else None
        one_pass = ModelPass(draft, *sizes) if isinstance(draft, Decoder) else head
        self._forward = ForwardPrograms(
            decoder, backend, shapes.cache, shapes.slots, mesh, shapes.max_model_len, self.adapters, head
        )
        self._draft = None if one_pass is None else DraftPrograms(one_pass, backend, shapes.cache, shapes.slots, mesh)
        self.copied: list[Copied] = copied_kinds(shapes.cache, shapes.host)
        """What goes to the host's memory: pages, and states."""
        self._copies = [CopyPrograms(backend, shapes.cache, mesh, copied) for copied in self.copied]
        self._on_compiled, self._stored = on_compiled, stored
        self._layouts = [shapes.layout(tokens) for tokens in shapes.buckets]
        self._executables: dict[tuple[str, int], Any] = {}
        self._ready: list[StepLayout] = []
        self._ready_tokens: list[int] = []
        self.scratch_bytes = 0
        """The most that a step takes besides weights and pages; 0 if the compiler does not say."""
        self._compilers, self._compiling = ThreadPoolExecutor(usable_cores(), "compile"), list[Future[None]]()
        self._is_abandoned = False
        self.staged = StagedCompilation([], self._publish)
        """Functions that are left to be compiled while serving."""

    def compile(self, report: Callable[[Progress], None], *, staged: bool = False) -> None:
        """``begin`` and ``complete``."""
        self.begin(staged=staged)
        self.complete(report)

    def begin(self, *, staged: bool = False) -> None:
        """Have every program of every bucket compiled, one per core at a time: XLA releases the GIL.

        If ``staged``, it is buckets that cover all steps; the others are left to ``self.staged``.
        """
        buckets = self.shapes.buckets
        jobs = self._jobs(covering_buckets(buckets) if staged else buckets)
        try:
            for job in jobs:
                self._compiling.append(self._compilers.submit(job))
        except BaseException:  # a signal
            self.abandon()
            raise

    def complete(self, report: Callable[[Progress], None]) -> None:
        """Wait for what has begun, and let steps use it; raises the error of a job that failed."""
        count, at_first = len(self._compiling), sum(job.done() for job in self._compiling)
        try:
            report(Progress("compiling", at_first, count, "functions"))
            for done, job in enumerate(as_completed(self._compiling), start=1):
                job.result()
                if done > at_first:
                    report(Progress("compiling", done, count, "functions"))
        except BaseException:
            self.abandon()
            raise
        self._compilers.shutdown()
        self._publish()
        self.staged = StagedCompilation(self._jobs(self.shapes.buckets), self._publish)

    def abandon(self) -> None:
        """Compile nothing of what has begun but what the compiler has by now: after a fault, or a signal."""
        self._is_abandoned = True
        self._compilers.shutdown(wait=False, cancel_futures=True)

    @property
    def weights(self) -> list[Array]:
        """The arguments of FORWARD that are the model's."""
        return self._forward.weights

    @property
    def head(self) -> tuple[Weight, Array | None]:
        """See ForwardPrograms."""
        return self._forward.head

    def adopt_weights(self) -> None:
        """Use the arrays that the decoders have now in the steps to come. Nothing is compiled."""
        self._forward.adopt_weights()
        if self._draft is not None:
            self._draft.adopt_weights()

    @property
    def feeds_drafts(self) -> bool:
        """Whether FEED_DRAFT_MODEL feeds a draft model what DRAFT does not."""
        return self._draft is not None and self._draft.feeds

    @property
    def draft_weights(self) -> list[Array]:
        """The draft model's."""
        assert self._draft is not None
        return self._draft.weights

    def layout_for(self, num_tokens: int) -> StepLayout:
        """The smallest compiled bucket that holds a step."""
        return self._ready[bisect_left(self._ready_tokens, num_tokens)]

    def executable(self, name: str, size: int) -> Any:
        """A compiled program for so many tokens, rows or pages."""
        return self._executables[name, size]

    def _jobs(self, buckets: list[int]) -> list[Callable[[], None]]:
        """Jobs for what these buckets need and is not compiled yet, bucket by bucket."""
        missing: dict[tuple[str, int], Program] = {}
        for layout in self._layouts:
            if layout.tokens in buckets:
                missing |= {(program.name, program.size): program for program in self.programs(layout)}
        return [partial(self._compile, program) for key, program in missing.items() if key not in self._executables]

    def programs(self, layout: StepLayout) -> Iterator[Program]:
        """Every program that a bucket's step may run."""
        yield from self._forward.of(layout)
        yield from self._forward.writers()
        if self._draft is not None:
            yield from self._draft.of(layout, self.shapes.draft_rows_of(layout.tokens))
        yield from self.sampling.of(layout)
        few = self.shapes.few_rows
        if few < layout.rows:
            yield self.sampling.take_logits(layout, few)
            yield from self.sampling.of(self.shapes.layout(few))
        yield from self._forward.prompt_logprobs(PROMPT_BLOCK)
        yield from self.sampling.writers()
        for copies in self._copies:
            yield from copies.all()
        if self.adapters is not None:
            yield self.adapters.write()

    def _compile(self, program: Program) -> None:
        stored = None if self._stored is None else self._stored.read(program.name, program.size)
        if stored is None:
            identity = None if self._stored is None else self._stored.identity
            compilation: Compilation = compile_program(program, self._check_wanted, identity)
            stored = Stored(compilation.compiled, scratch_bytes(compilation.compiled))
            if self._stored is not None and compilation.is_new:
                self._stored.write(program.name, program.size, stored)
            self._on_compiled(compilation)
        self._executables[program.name, program.size] = stored.compiled
        if program.name in (FORWARD, ADAPTED_FORWARD, FEED_DRAFT_MODEL, DRAFT):
            self.scratch_bytes = max(self.scratch_bytes, stored.scratch_bytes)

    def _check_wanted(self) -> None:
        if self._is_abandoned:
            raise CancelledError

    def _publish(self) -> None:
        """Let steps use the buckets whose programs are all compiled."""
        self._ready = [
            layout
            for layout in self._layouts
            if all((program.name, program.size) in self._executables for program in self.programs(layout))
        ]
        self._ready_tokens = [layout.tokens for layout in self._ready]
