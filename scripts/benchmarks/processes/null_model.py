"""A child that times the real scheduler, ModelIOProcessor, runner, engine and threads over a model that is nothing.

The null model's functions are compiled, take and donate what real ones do, and compute next to nothing: the time of a
step is what the host needs to plan, prepare, transfer, dispatch, wait, land and hand over. Every sequence that ends is
followed by another, so steps that admit are among those that are counted.
"""

import functools
import itertools
import random
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from caching.cache_groups import CacheGroups
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.page_manager import HBMPageManager
from caching.paged_attention_cache import PagedAttentionCache
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.devices.mesh import one_device
from engine.hub.names import DEMO_MODEL
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.sampler_inputs import NUM_FIELDS
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.forward_programs import FORWARD, WRITE_SLOTS
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SEPARATE
from engine.step.runner import eSurgeRunner
from engine.step.sampling_programs import SamplingPrograms
from engine.step.step_shapes import StepShapes
from scripts.benchmarks.processes.child import answer_all

LAYERS, ARRAYS_PER_LAYER = 12, 6
PAGE_SIZE, CONTEXT, PROMPT, VOCABULARY = 16, 2048, 128, 2048
BUDGET = 512
SHORTEST, LONGEST = 64, 256
TOKEN = 300
"""What the null model always says."""


class NullExecutionManager:
    """ExecutionManager's surface over programs that give every row the same token."""

    def __init__(self, shapes: StepShapes) -> None:
        self.weights = [jnp.zeros(1) for _ in range(LAYERS * ARRAYS_PER_LAYER)]
        self.shapes, self.mesh = shapes, one_device()
        self.new_cache = functools.partial(PagedAttentionCache.allocate, shapes.cache)
        self.sampling = SamplingPrograms(shapes.slots, VOCABULARY, self.mesh)
        self.adapters, self.feeds_drafts = None, False
        self._layouts = [shapes.layout(tokens) for tokens in shapes.buckets]
        self._tokens = list(shapes.buckets)
        self._executables: dict[tuple[str, int], Any] = {}

    def layout_for(self, num_tokens: int) -> StepLayout:
        """The smallest bucket that holds a step."""
        return self._layouts[bisect_left(self._tokens, num_tokens)]

    def executable(self, name: str, size: int) -> Any:
        """A step of no model, a write as a model's, or no sampling: one does for all of that.

        They are looked up as ExecutionManager's are, and made when they are first asked for.
        """
        executable = self._executables.get((name, size))
        if executable is None:
            executable = self._executables[name, size] = self._made(name, size)
        return executable

    def _made(self, name: str, size: int) -> Any:
        if name == WRITE_SLOTS:
            return _write_slots(self.shapes)
        return (_forward if name == FORWARD else _sampler)(self.shapes.layout(size), self.shapes)


def null_engine(max_num_seqs: int) -> oEngine:
    """An engine whose device has nothing to do; pages for all that may run."""
    pages_per_seq = pages_for(CONTEXT, PAGE_SIZE)
    metadata = PagedAttentionCacheMetaData(
        num_layers=LAYERS, num_pages=2, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=2, dtype=np.dtype(np.float32)
    )
    budget = max(BUDGET, max_num_seqs)
    shapes = StepShapes(max_num_seqs, budget, CONTEXT, metadata)
    pages = HBMPageManager(1 + max_num_seqs * pages_per_seq)
    scheduler = InferenceScheduler(
        SequenceMemory(pages, CacheGroups(PAGE_SIZE)), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    runner = eSurgeRunner(NullExecutionManager(shapes), seed=0)  # type: ignore[arg-type]
    limits = ServingLimits(CONTEXT, VOCABULARY, (), PAGE_SIZE, max_num_seqs=max_num_seqs)
    return oEngine(scheduler, runner, limits, run_ahead=1)


def step_times(rows: int, waiting: int, steps: int) -> list[float]:
    """Seconds of each step of a bare loop, once all rows decode."""
    engine, sequences = null_engine(rows), _sequences()
    for sequence in itertools.islice(sequences, rows + waiting):
        engine.add(sequence)
    for _ in range(rows * PROMPT // BUDGET + SHORTEST // 2):
        _step(engine, sequences)
    return [_step(engine, sequences) for _ in range(steps)]


def driver_step_time(rows: int, steps: int) -> float:
    """Seconds a step, on average, through oDriver, whose threads share the GIL; texts are made and dropped."""
    channel = _LastSamples()
    driver = oDriver(null_engine(rows), HuggingFaceTokenizer(DEMO_MODEL))
    driver.start()
    try:
        began, before = time.perf_counter(), driver.status().steps
        for number in range(rows):
            params = {"max_tokens": steps, "temperature": 0.0, "ignore_eos": True}
            driver.submit_request(
                ActiveRequest(request_id=str(number), channel=channel, prompt=[TOKEN] * PROMPT, params=params)
            )
        for _ in range(rows):
            channel.ended.acquire()
        return (time.perf_counter() - began) / (driver.status().steps - before)
    finally:
        driver.stop("measured")


def _step(engine: oEngine, sequences: Iterator[Sequence]) -> float:
    """One step as the execution loop makes it; whoever it ended is replaced, which isn't timed."""
    began = time.perf_counter()
    outputs = engine.step()
    engine.stats()
    seconds = time.perf_counter() - began
    for output in outputs:
        if output.finish_reason is not None:
            engine.add(next(sequences))
    return seconds


def _sequences() -> Iterator[Sequence]:
    """Sequences without end, of differing lengths, so that they don't end all at once."""
    rng, prompt, params = random.Random(0), [TOKEN] * PROMPT, SamplingParams(temperature=0)
    for number in itertools.count():
        yield Sequence(str(number), prompt, params, frozenset(), rng.randint(SHORTEST, LONGEST), seed=number)


@functools.cache
def _forward(layout: StepLayout, shapes: StepShapes) -> Any:
    def step(weights: Any, cache: Any, slots: Any, last_token: Any, packed: Any) -> Any:  # noqa: ARG001 - as a model's
        slots, _, sampling = layout.unpack(packed, slots, last_token)
        return cache, slots, jnp.zeros(1), jnp.zeros(1), sampling

    weights = [jnp.zeros(1)] * (LAYERS * ARRAYS_PER_LAYER)
    cache = jax.eval_shape(lambda: PagedAttentionCache.allocate(shapes.cache))
    slots = jax.eval_shape(shapes.slots.new_state)
    arguments = (weights, cache, slots, _last_token(shapes), _integers(layout.size))
    return jax.jit(step, donate_argnums=(1, 2), keep_unused=True).lower(*arguments).compile()


@functools.cache
def _write_slots(shapes: StepShapes) -> Any:
    arguments = jax.eval_shape(shapes.slots.new_state), _integers(SEPARATE.size)
    write = jax.jit(lambda slots, changes: slots.after(SEPARATE, changes), donate_argnums=0)
    return write.lower(*arguments).compile()


@functools.cache
def _sampler(layout: StepLayout, shapes: StepShapes) -> Any:
    def draw(logits: Any, last_token: Any, sampling: Any, key: Any) -> Any:  # noqa: ARG001 - as a sampler's
        return jnp.full(layout.rows, TOKEN, jnp.int32), last_token

    arguments = (jnp.zeros(1), _last_token(shapes), _sampling(layout), jax.random.key(0))
    return jax.jit(draw, donate_argnums=1, keep_unused=True).lower(*arguments).compile()


def _last_token(shapes: StepShapes) -> jax.ShapeDtypeStruct:
    return _integers(shapes.max_num_seqs + 1)


def _sampling(layout: StepLayout) -> jax.ShapeDtypeStruct:
    return _integers(NUM_FIELDS, layout.rows)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class _LastSamples:
    """A channel that counts ends."""

    def __init__(self) -> None:
        self.ended = threading.Semaphore(0)

    def put(self, sample: ReturnSample) -> None:
        """Drops the sample."""
        if sample.is_last:
            self.ended.release()


def _answer(question: dict[str, int]) -> list[float]:
    """Seconds a step: of each in a bare loop, or on average through the driver, where nothing waits."""
    if "waiting" in question:
        return step_times(**question)
    driver_step_time(question["rows"], SHORTEST)
    return [driver_step_time(**question)]


if __name__ == "__main__":
    answer_all(_answer)
