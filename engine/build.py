"""From an EngineConfig to an engine that is ready: weights read, memory taken, functions compiled and run once."""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.page_dtype import NAMES
from caching.page_manager import HBMPageManager
from caching.paged_attention_cache import PagedAttentionCache
from engine.config import EngineConfig, ServingLimits
from engine.device_errors import DeviceError, acquire_devices, device_errors
from engine.errors import ConfigurationError
from engine.hosts.processes import least_of_all
from engine.mesh import DeviceMesh
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.sharding import most_devices, spread
from engine.models.weights import load_decoder, parameter_bytes
from engine.oengine import MAX_FAILURES_IN_A_ROW, oEngine
from engine.progress import Progress
from engine.scheduling.scheduler import InferenceScheduler
from engine.staged_compilation import StagedCompilation
from engine.step.backend import Backend, choose_backend, default_page_size
from engine.step.commands import Command
from engine.step.execution_manager import ExecutionManager, StepShapes
from engine.step.page_budget import CachePlanner, memory_budget
from engine.step.runner import eSurgeRunner, tell_nobody
from engine.step.step_executor import StepExecutor
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parent / "models" / "demo"
"""The small model that oDriver ships and serves when it is given none."""


Report = Callable[[Progress], None]
Built = TypeVar("Built")


@dataclass(frozen=True)
class _Compiled:
    """What engines and executors are made of."""

    manager: ExecutionManager
    shapes: StepShapes
    staged: StagedCompilation
    allocate: Callable[[], PagedAttentionCache]
    mesh: DeviceMesh
    model: ModelConfig


def build_engine(config: EngineConfig, report: Report, tell: Callable[[Command], None] = tell_nobody) -> oEngine:
    """An engine ready to step, which tells other processes what to do with it (engine/hosts/processes.py).

    Raises ConfigurationError where the model or the machine cannot do what is asked, and DevicesUnavailable.
    """
    return _build(config, report, lambda compiled: _engine(config, compiled, tell))


def build_executor(config: EngineConfig, report: Report) -> StepExecutor:
    """The part in another process's engine that this process's devices have. Raises as ``build_engine`` does."""

    def executor(compiled: _Compiled) -> StepExecutor:
        return StepExecutor(compiled.manager, compiled.shapes, compiled.allocate, config.seed, compiled.mesh)

    return _build(config, report, executor)


def _build(config: EngineConfig, report: Report, complete: Callable[[_Compiled], Built]) -> Built:
    _leave_a_core_to_the_kernels()
    directory = config.model or DEMO_MODEL
    model = read_model_config(directory)
    acquire_devices()
    model = spread_over_devices(config, model)
    mesh = DeviceMesh(tuple(jax.devices()[: model.tensor_parallel_size]))
    dtype = np.dtype(jnp.dtype(config.dtype or _default_dtype()))
    max_model_len = asked_context(config, model)
    _use_compilation_cache()
    report(Progress("preparing kernels", 0, 1, "steps"))
    page_size = config.page_size or default_page_size()
    kv_dtype = page_dtype(config, dtype)
    backend = _choose(config, model, page_size, kv_dtype)
    report(Progress("preparing kernels", 1, 1, "steps"))
    weights = _weights_dtype(config, model, backend, dtype)
    one_page = backend.one_page(model, page_size, kv_dtype)
    budget = least_of_all(memory_budget(config, mesh.num_local))
    planner = CachePlanner(config, model, max_model_len, one_page, weight_bytes(config, model, weights), budget)
    metadata = planner.plan()
    check_page_table(config, backend, pages_for(fitting_context(config, max_model_len, metadata), page_size))
    decoder = load_decoder(
        directory,
        model,
        weights,
        mesh=mesh,
        arrange=partial(backend.arrange, activations=dtype if config.quantization else None),
        progress=lambda done, total: report(_loading(done, total)),
    )
    backend.prepare(decoder)
    while True:
        try:
            return complete(_compile(config, decoder, backend, mesh, max_model_len, planner, metadata, report))
        except DeviceError as refusal:
            if not refusal.out_of_memory or jax.process_count() > 1:  # the others would know nothing of it
                raise
            why = str(refusal)
        gc.collect()  # what the attempt has left on the device
        metadata = planner.back_off(metadata, why)


def _choose(config: EngineConfig, model: ModelConfig, page_size: int, kv_dtype: np.dtype[Any]) -> Backend:
    """The operations that serve a model which has been spread over devices."""
    devices = model.tensor_parallel_size
    return choose_backend(
        page_size, model.head_dim, kv_dtype, devices, model.stored_kv_heads // devices, config.attention_backend
    )


def _engine(config: EngineConfig, compiled: _Compiled, tell: Callable[[Command], None]) -> oEngine:
    """Raises DeviceError where there is no memory for it."""
    shapes, model = compiled.shapes, compiled.model
    with device_errors():
        runner = eSurgeRunner(compiled.manager, shapes, compiled.allocate, config.seed, compiled.mesh, tell)
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
    limits = ServingLimits(shapes.max_model_len, model.vocab_size, model.eos_token_ids, shared)
    engine = oEngine(
        scheduler,
        runner,
        pages,
        limits,
        run_ahead=config.run_ahead,
        max_failures_in_a_row=MAX_FAILURES_IN_A_ROW if config.hosts is None else 1,
        staged=compiled.staged,
    )
    warm_up(engine)
    return engine


def _compile(
    config: EngineConfig,
    decoder: Decoder,
    backend: Backend,
    mesh: DeviceMesh,
    max_model_len: int,
    planner: CachePlanner,
    metadata: PagedAttentionCacheMetaData,
    report: Report,
) -> _Compiled:
    """The steps for a pool; again for a smaller one, where they show that there is no room for it beside them.

    Raises DeviceError where there is no memory even without them.
    """
    with device_errors():
        jax.block_until_ready(
            backend.allocator(metadata, mesh)()
        )  # and let go: a pool that is too large is better found before compiling than after
    while True:
        shapes = StepShapes(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=fitting_context(config, max_model_len, metadata),
            cache=metadata,
            smallest_step=backend.smallest_step,
        )
        manager = ExecutionManager(decoder, shapes, backend, mesh)
        with device_errors():
            staged = manager.compile(report, staged=config.staged_readiness)
        planner.count_scratch(manager.scratch_bytes)
        left = planner.plan()
        if left.num_pages >= metadata.num_pages:
            return _Compiled(manager, shapes, staged, backend.allocator(metadata, mesh), mesh, decoder.config)
        logger.warning(
            "a compiled step takes %s bytes beside weights and pages, more than was reckoned with: %s pages instead of %s",
            f"{manager.scratch_bytes:,}", f"{left.num_pages:,}", f"{metadata.num_pages:,}",
        )  # fmt: skip
        metadata = left


def describe(config: EngineConfig) -> dict[str, str]:
    """What ``build_engine`` serves, and on what, for people to read; looks at no weights."""
    directory = config.model or DEMO_MODEL
    devices = jax.devices()
    on_hosts = "" if config.hosts is None else f", on {jax.process_count()} hosts"
    model = read_model_config(directory)
    spread = spread_over_devices(config, model)
    size = spread.tensor_parallel_size
    page_size, dtype = config.page_size or default_page_size(), np.dtype(jnp.dtype(config.dtype or _default_dtype()))
    kv_dtype = page_dtype(config, dtype)
    backend = _choose(config, spread, page_size, kv_dtype)
    weights = _weights_dtype(config, model, backend, dtype)
    if config.quantization:
        weights = np.dtype(config.quantization)
    aside = [f"weights {'in' if config.quantization else 'as stored in'} {weights}"] * (weights != dtype)
    aside += [f"pages in {kv_dtype}"] * (kv_dtype != dtype)
    return {
        "model": str(directory),
        "parameters": f"{parameter_bytes(model, jnp.float32) // 4:,}",
        "dtype": ", ".join([dtype.name, *aside]),
        "device": f"{size} x {devices[0].device_kind}"
        + ("" if size == len(devices) else f", of {len(devices)}")
        + on_hosts,
        "operations": backend.description,
    }


def spread_over_devices(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """A model as this machine's devices serve it. Raises ConfigurationError where it cannot be split as was asked."""
    there, asked = jax.device_count(), config.tensor_parallel_size
    if jax.process_count() > 1:  # none may be left without a part
        if asked not in (None, there):
            raise ConfigurationError(
                f"tensor_parallel_size {asked} is not the {there} devices of all hosts: leave it out"
            )
        return spread(model, there)
    if asked is not None and asked > there:
        raise ConfigurationError(
            f"tensor_parallel_size {asked} is more than the {there} devices of this machine: lower it"
        )
    return spread(model, asked or (1 if jax.default_backend() == "cpu" else most_devices(model, there)))


def _default_dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def weight_bytes(config: EngineConfig, model: ModelConfig, dtype: np.dtype[Any]) -> int:
    """What each device has of the weights, which are stored in ``dtype`` where they are not quantized."""
    return parameter_bytes(model, dtype, quantized=config.quantization is not None)


def page_dtype(config: EngineConfig, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What keys and values lie in, where activations are of ``dtype``."""
    return dtype if config.kv_cache_dtype == "auto" else NAMES[config.kv_cache_dtype]


def _weights_dtype(config: EngineConfig, model: ModelConfig, backend: Backend, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What weights lie in: bfloat16 ones as they are where kernels read them as the float32 that they stand for.

    That gives the same numbers as float32 weights for half the memory and, at few rows, in half the time.
    """
    exact = config.dtype is None and model.dtype == "bfloat16" and backend.packs
    return np.dtype(jnp.bfloat16) if exact else dtype


def asked_context(config: EngineConfig, model: ModelConfig) -> int:
    """The context to plan with: the operator's or the model's. Raises ConfigurationError where it is more than the model's."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigurationError(
            f"max_model_len {asked} is more than the {model.max_position} positions the model was made for: lower it"
        )
    return asked or model.max_position


def fitting_context(config: EngineConfig, max_model_len: int, metadata: PagedAttentionCacheMetaData) -> int:
    """The context that a pool allows; less than the operator asked for is not what they asked for."""
    pool = metadata.num_usable_tokens
    if config.max_model_len is not None and pool < max_model_len:
        raise ConfigurationError(
            f"the pool holds {pool} tokens, which is less than max_model_len {max_model_len}: lower max_model_len, or "
            f"give more memory (hbm_utilization, num_pages)"
        )
    fitting = min(max_model_len, pool)
    if fitting < 2:
        raise ConfigurationError(
            f"a context of {fitting} token has no room for a prompt and an answer: raise max_model_len or num_pages"
        )
    return fitting


def check_page_table(config: EngineConfig, backend: Backend, pages_per_seq: int) -> None:
    """Raises ConfigurationError where a step's page table is more than the attention kernel has room for."""
    if not backend.holds_table(config.max_num_seqs, pages_per_seq):
        raise ConfigurationError(
            f"the attention kernel has no room for the page table of max_num_seqs {config.max_num_seqs} sequences of up to "
            f"{pages_per_seq:,} pages: raise page_size, or lower max_model_len or max_num_seqs"
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


def _loading(done: int, total: int) -> Progress:
    return Progress("loading weights", done, total, "bytes")
