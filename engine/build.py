"""From an EngineConfig to an engine that is ready: weights read, memory taken, functions compiled and run once."""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax

from caching.page_manager import HBMPageManager
from engine.config import EngineConfig, ServingLimits
from engine.device_errors import DeviceError, device_errors
from engine.hosts.processes import least_of_all
from engine.models.decoder import Decoder
from engine.oengine import MAX_FAILURES_IN_A_ROW, oEngine
from engine.progress import Progress
from engine.scheduling.scheduler import InferenceScheduler
from engine.served_model import ServedModel, served_model
from engine.step.commands import Command
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import StepExecutor
from engine.step.layout import StepShapes
from engine.step.page_budget import CachePlanner, check_page_table, memory_budget
from engine.step.runner import eSurgeRunner, tell_nobody
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

Report = Callable[[Progress], None]
Compile = Callable[[ServedModel, Decoder, StepShapes, Report], ExecutionManager]
"""Compiles the steps of a decoder. Raises jax.errors.JaxRuntimeError where the device has no memory."""
Built = TypeVar("Built")


@dataclass(frozen=True)
class CompiledSteps:
    """What engines and executors are made of."""

    served: ServedModel
    manager: ExecutionManager

    def executor(self) -> StepExecutor:
        """The part of the engine that this process's devices have."""
        return StepExecutor(self.manager, self.served.config.seed)

    def engine(self, tell: Callable[[Command], None]) -> oEngine:
        """An engine that has answered its first request. Raises DeviceError where there is no memory for it."""
        config, shapes, model = self.served.config, self.manager.shapes, self.served.model
        with device_errors():
            runner = eSurgeRunner(self.manager, config.seed, tell)
        pages = HBMPageManager(shapes.cache.num_pages)
        scheduler = InferenceScheduler(
            pages,
            page_size=shapes.cache.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            priority_preemption_threshold=config.priority_preemption_threshold,
            client_weights=config.weights,
        )
        shared = shapes.cache.page_size if config.enable_prefix_caching else None
        engine = oEngine(
            scheduler,
            runner,
            pages,
            ServingLimits(shapes.max_model_len, model.vocab_size, model.eos_token_ids, shared),
            run_ahead=config.run_ahead,
            max_failures_in_a_row=MAX_FAILURES_IN_A_ROW if config.hosts is None else 1,
            staged=self.manager.staged,
        )
        warm_up(engine)
        return engine


def compile_steps(served: ServedModel, decoder: Decoder, shapes: StepShapes, report: Report) -> ExecutionManager:
    """Every function that a step may need; a Compile."""
    manager = ExecutionManager(decoder, shapes, served.backend, served.mesh)
    manager.compile(report, staged=served.config.staged_readiness)
    return manager


def build_engine(config: EngineConfig, report: Report, tell: Callable[[Command], None] = tell_nobody) -> oEngine:
    """An engine ready to step, which tells other processes what to do with it (engine/hosts/processes.py).

    Raises ConfigurationError where the model or the machine cannot do what is asked, and DevicesUnavailable.
    """
    return build(config, report, lambda compiled: compiled.engine(tell))


def build_executor(config: EngineConfig, report: Report) -> StepExecutor:
    """The part of another process's engine that this process's devices have. Raises as ``build_engine`` does."""
    return build(config, report, CompiledSteps.executor)


def build(
    config: EngineConfig,
    report: Report,
    complete: Callable[[CompiledSteps], Built],
    compile_steps: Compile = compile_steps,
) -> Built:
    """What ``complete`` makes of the largest pool that the device accepts, and of the steps compiled for it.

    Fewer pages are tried where the device refuses a pool or ``complete`` raises DeviceError for want of memory, and where
    the compiled steps need more memory than was planned.
    """
    _leave_a_core_to_the_kernels()
    report(Progress("preparing kernels", 0, 1, "steps"))
    served = served_model(config)
    _use_compilation_cache()
    report(Progress("preparing kernels", 1, 1, "steps"))
    budget = least_of_all(memory_budget(config, served.mesh.num_local))
    planner = CachePlanner(config, served.model, served.one_page, served.weight_bytes, budget)
    check_page_table(config, served.backend, _shapes(served, planner).pages_per_seq)
    decoder = served.load(lambda done, total: report(Progress("loading weights", done, total, "bytes")))
    while True:
        try:
            return complete(_compile(served, decoder, planner, report, compile_steps))
        except DeviceError as refusal:
            if not refusal.out_of_memory or jax.process_count() > 1:  # the others would know nothing of it
                raise
            why = str(refusal)
        gc.collect()  # what the attempt has left on the device
        planner.back_off(why)


def _compile(
    served: ServedModel, decoder: Decoder, planner: CachePlanner, report: Report, compile_steps: Compile
) -> CompiledSteps:
    """The steps over the planner's pool; again over a smaller one, if they need more scratch than was planned with.

    Raises DeviceError where the device has no memory for the pool alone, or for a step.
    """
    while True:
        shapes = _shapes(served, planner)
        with device_errors():
            jax.block_until_ready(served.allocator(shapes.cache)())  # dropped: a refusal is known before compiling
            manager = compile_steps(served, decoder, shapes, report)
        if planner.fits(manager.scratch_bytes):
            return CompiledSteps(served, manager)


def _shapes(served: ServedModel, planner: CachePlanner) -> StepShapes:
    """The sizes of the steps over the planner's pool. Raises ConfigurationError where the context does not fit it."""
    return StepShapes(
        max_num_seqs=served.config.max_num_seqs,
        max_num_batched_tokens=served.config.max_num_batched_tokens,
        max_model_len=planner.max_model_len,
        cache=planner.pool,
        smallest_step=served.backend.smallest_step,
    )


def _use_compilation_cache() -> None:
    """Keep compiled steps between starts, where JAX_COMPILATION_CACHE_DIR or XDG_CACHE_HOME say."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "odriver" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _leave_a_core_to_the_kernels() -> None:
    """Give XLA:CPU a thread less than there are cores: its threads spin, and ours would take turns with them.

    With one for each core a step of one row takes up to 1.8 times as long. XLA has no other setting for it, and reads
    this one when JAX first looks for devices.
    """
    os.environ.setdefault("NPROC", str(max(1, len(os.sched_getaffinity(0)) - 1)))
