"""Builds an engine from an EngineConfig: reads weights, allocates pages, compiles and warms up."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax

from caching.page_manager import HBMPageManager
from engine.config import EngineConfig
from engine.devices.device_errors import DeviceError, device_errors
from engine.devices.xla_threads import limit_xla_threads
from engine.errors import ConfigurationError
from engine.hosts.agreement import check_facts_alike, least_of_all
from engine.hosts.other_processes import ALONE, OtherProcesses
from engine.live.live_weights import LiveWeights
from engine.memory.device_memory import memory_budget
from engine.memory.page_budget import CachePlanner, check_page_table
from engine.oengine import oEngine
from engine.progress import Progress
from engine.request_limits import ServingLimits
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.estimates.step_costs import StepCosts
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.prefixes.earlier_texts import EarlierTexts
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation
from engine.served_model import Decoders, ServedModel, served_model
from engine.speculation.speculative_config import NGRAM
from engine.step.executables.compilation_cache import use_compilation_cache
from engine.step.executables.identity import stored_executables
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import StepExecutor
from engine.step.failures import MAX_FAILURES_IN_A_ROW
from engine.step.host_cache.host_budget import check_host_memory
from engine.step.host_cache.host_slots import copy_seconds
from engine.step.runner import eSurgeRunner
from engine.step.step_shapes import StepShapes
from engine.warm_up import warm_up

logger = logging.getLogger(__name__)

Report = Callable[[Progress], None]
Begin = Callable[[ServedModel, Decoders, StepShapes], ExecutionManager]
"""Begins to compile the steps of decoders, which may be abstract."""
Built = TypeVar("Built")


@dataclass(frozen=True)
class CompiledSteps:
    """The compiled steps of a model, from which an engine or an executor is built."""

    served: ServedModel
    manager: ExecutionManager
    fingerprint: str
    """See oEngine."""

    def executor(self) -> StepExecutor:
        """The part of an engine that runs on this process's devices."""
        return StepExecutor(self.manager, self.served.config.seed, self._weights())

    def engine(self, others: OtherProcesses = ALONE) -> oEngine:
        """An engine that has completed its warm-up. Raises DeviceError if it is out of memory."""
        config, cache, host = self.served.config, self.manager.shapes.cache, self.manager.shapes.host
        with device_errors():
            weights = self._weights()
            runner = eSurgeRunner(self.manager, config.seed, others, weights)
        pages, slots = HBMPageManager(cache.num_pages, None if host is None else host.tier()), None
        if cache.states is not None:
            of_states = None if host is None else host.states
            slots = HBMPageManager(cache.states.num_slots, None if of_states is None else of_states.tier())
        engine = oEngine(
            self._scheduler(pages, slots),
            runner,
            self._limits(),
            run_ahead=config.run_ahead,
            max_failures_in_a_row=MAX_FAILURES_IN_A_ROW if config.hosts is None else 1,
            staged=self.manager.staged,
            replaced_kernels=len(self.served.backend.replaced),
            weights=weights,
            description=self.served.describe(),
            fingerprint=self.fingerprint,
        )
        warm_up(engine)
        return engine

    def _scheduler(self, pages: HBMPageManager, slots: HBMPageManager | None) -> InferenceScheduler:
        """Of sequences that have these pages, and slots for their recurrent states if the model has such."""
        config, shapes = self.served.config, self.manager.shapes
        states = None if slots is None else SequenceStates(slots, shapes.cache.page_size, config.max_num_seqs)
        costs = StepCosts(shapes.cost_sizes)
        return InferenceScheduler(
            SequenceMemory(pages, shapes.groups, states, _copy_cost(shapes), EarlierTexts(shapes.slots.num_earlier)),
            adapters=AdapterSlots(0 if shapes.adapters is None else shapes.adapters.max_loras),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            priority_preemption_threshold=config.priority_preemption_threshold,
            client_weights=config.weights,
            step_costs=costs,
            speculation=self._speculation(costs),
            inter_token_seconds=config.inter_token_seconds,
        )

    def _speculation(self, costs: StepCosts) -> Speculation | None:
        spec, draft = self.manager.shapes.speculation, self.served.draft
        if spec is None:
            return None
        return Speculation(
            spec.num_speculative_tokens,
            costs.seconds,
            self.manager.shapes.cost_sizes,
            has_model=spec.has_model,
            draft_context=None if draft is None else draft.model.max_position,
        )

    def _limits(self) -> ServingLimits:
        config, shapes, model = self.served.config, self.manager.shapes, self.served.model
        generation, spec = self.served.generation, shapes.speculation
        return ServingLimits(
            shapes.max_model_len,
            model.vocab_size,
            tuple(dict.fromkeys((*model.eos_token_ids, *generation.eos_token_ids))),
            shapes.cache.page_size if config.enable_prefix_caching else None,
            generation.sampling_params,
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=shapes.num_drafts,
            prompt_lookup=spec.lookup_sizes if spec is not None and spec.method == NGRAM else None,
        )

    def _weights(self) -> LiveWeights:
        return LiveWeights(self.served, self.manager.decoder)


def begin_compiling(
    served: ServedModel, decoders: Decoders, shapes: StepShapes, *, keep: bool = False
) -> ExecutionManager:
    """Begin with every function that a step may need; a Begin. If ``keep``, later starts read them."""
    stored = stored_executables(served, decoders, shapes) if keep else None
    manager = ExecutionManager(decoders.model, shapes, served.backend, served.mesh, draft=decoders.draft, stored=stored)
    manager.begin(staged=served.config.staged_readiness)
    return manager


def build_engine(
    config: EngineConfig, report: Report, others: OtherProcesses = ALONE, *, keep_executables: bool = False
) -> oEngine:
    """An engine ready to step. The ``others`` hear its commands (hosts/processes.py).

    If ``keep_executables``, later starts with the same configuration need not even trace the steps,
    on one host. Raises DevicesUnavailable, and ConfigurationError if the model or machine cannot
    serve this.
    """
    begin = partial(begin_compiling, keep=keep_executables and config.hosts is None)
    return build(config, report, lambda steps: steps.engine(others), begin)


def build_executor(config: EngineConfig, report: Report) -> StepExecutor:
    """This process's part of another process's engine. Raises as ``build_engine`` does."""
    return build(config, report, CompiledSteps.executor)


def build(
    config: EngineConfig,
    report: Report,
    complete: Callable[[CompiledSteps], Built],
    begin: Begin = begin_compiling,
) -> Built:
    """Call ``complete`` with the steps compiled for the largest pool that the device accepts.

    Weights are read meanwhile: a compiler needs no more than their shapes.

    A smaller pool is tried if the device refuses one, if ``complete`` raises DeviceError because
    it is out of memory, or if the compiled steps need more memory than was planned.
    """
    limit_xla_threads()
    report(Progress("preparing kernels", 0, 1, "steps"))
    use_compilation_cache()
    served = served_model(config)
    report(Progress("preparing kernels", 1, 1, "steps"))
    budget = least_of_all(memory_budget(config, served.mesh.num_local))
    served, planner = planned(served, budget)
    if planner.host is not None:
        on_host = jax.default_backend() == "cpu"
        check_host_memory(
            planner.host,
            (planner.pool.num_bytes + served.footprint.resident_bytes) * served.mesh.num_local * on_host,
        )
    check_page_table(served.backend, planner.shapes(served.backend, served.footprint.adapter_sizes).pages_per_seq)
    start = _Start(served, served.abstract_all(), report, begin)
    while True:
        try:
            return complete(start.compiled(planner))
        except DeviceError as refusal:
            if not refusal.out_of_memory or jax.process_count() > 1:  # the others would not retry
                raise
            why = str(refusal)
        gc.collect()  # frees the arrays of this attempt
        planner.back_off(why)


def planned(served: ServedModel, budget: int) -> tuple[ServedModel, CachePlanner]:
    """The model and its pages, in the first of its forms that leaves room for them."""
    planner = served.footprint.planner(budget)
    if (smaller := served.smaller) is None:
        return served, planner
    try:
        _ = planner.max_model_len
    except ConfigurationError as error:
        logger.warning("weights in %s instead of %s: %s", smaller.quantization, served.quantization, error)
        return planned(smaller, budget)
    return served, planner


class _Start:
    """The weights of a model and its compiled steps, made at the same time."""

    def __init__(self, served: ServedModel, decoders: Decoders, report: Report, begin: Begin) -> None:
        self._served, self._decoders = served, decoders
        self._report, self._begin = report, begin
        self._fingerprint: str | None = None
        """None before the weights are there."""

    def compiled(self, planner: CachePlanner) -> CompiledSteps:
        """The steps compiled over the planner's pool, which shrinks if they need more scratch.

        Raises DeviceError if the device has no memory for the pool, beside the weights if they are
        there, or for a step.
        """
        while True:
            shapes = planner.shapes(self._served.backend, self._served.footprint.adapter_sizes)
            with device_errors():
                jax.block_until_ready(self._served.allocator(shapes.cache)())  # probe, freed at once
            manager = self._begin(self._served, self._decoders, shapes)
            try:
                fingerprint = self._load()
                manager.adopt_weights()
                with device_errors():
                    manager.complete(self._report)
            except BaseException:
                manager.abandon()
                raise
            if planner.fits(manager.scratch_bytes):
                return CompiledSteps(self._served, manager, fingerprint)

    def _load(self) -> str:
        if self._fingerprint is None:
            self._fingerprint, of_drafts = self._served.load_all(
                self._decoders, lambda done, total: self._report(Progress("loading weights", done, total, "bytes"))
            )
            check_facts_alike({"the weights": self._fingerprint, "the weights of what drafts": of_drafts})
        return self._fingerprint


def _copy_cost(shapes: StepShapes) -> CopyCost | None:
    """What a page costs that comes from the host, measured now; None without a tier there."""
    if shapes.host is None:
        return None
    seconds, size = copy_seconds(shapes.cache.bytes_per_page), shapes.cache.bytes_per_page
    logger.info(
        "host cache: %s pages in %s bytes of the host's memory; a page of %s bytes comes back in %.3g ms (%.3g GB/s)",
        f"{shapes.host.num_slots:,}", f"{shapes.host.num_bytes:,}", f"{size:,}", 1000 * seconds, size / seconds / 1e9,
    )  # fmt: skip
    of_state = copy_seconds(shapes.cache.bytes_per_slot, 1) if shapes.host.states is not None else 0.0
    return CopyCost(seconds, shapes.max_num_batched_tokens, of_state)
