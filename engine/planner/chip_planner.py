"""Plans serving on absent TPUs: libtpu compiles everything that the daemon would."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Device

from caching.metadata import pages_for
from caching.tpu.tpu_chip import CHIPS, Chip
from engine.config import EngineConfig
from engine.devices.mesh import LOGITS, DeviceMesh
from engine.errors import ConfigurationError
from engine.memory.number_formats import in_words
from engine.memory.page_budget import check_page_table
from engine.models.decoder import Decoder, LayerStack
from engine.models.layers.experts import ExpertsMLP
from engine.models.model_config import read_config_file
from engine.models.partition import Partition, most_devices, split
from engine.models.spec import ModelSpec
from engine.models.weights.store import abstract_decoder
from engine.planner.chip_fit import ChipFit
from engine.planner.chip_plan import ChipPlan
from engine.planner.compiled_function import CompiledProgram, ExpertStack, LargeArrays
from engine.planner.planned_steps import decode_steps, prompt_steps
from engine.planner.topology import chips_of, topology_of
from engine.progress import Progress
from engine.speculation.read_draft import read_draft
from engine.step.backend import Backend
from engine.step.compilation import Compilation, compile_program
from engine.step.execution_manager import ExecutionManager
from engine.step.step_shapes import StepShapes

Report = Callable[[Progress], None]
DRAFTS = 4
"""For each sequence, in the figures of steps that verify drafts, unless the operator says."""


def plan_chips(config: EngineConfig, path: Path, topology: str, tokens_a_sequence: int, report: Report) -> ChipPlan:
    """Compile a daemon's functions for a topology. ``path`` is a config.json, without weights.

    ``topology`` is any name that ``topology_of`` knows. Raises ConfigurationError for others, and,
    with the arithmetic, if the model does not fit.
    """
    topology = topology_of(topology)
    devices = chips_of(topology)
    fit = _fit(config, path, devices)
    chip, partition = fit.chip, fit.partition
    fit.check(len(devices))
    cache = fit.planner()
    mesh = DeviceMesh(tuple(devices[: partition.devices]))
    shapes = cache.shapes(fit.backend, fit.footprint.adapter_sizes)
    check_page_table(fit.backend, shapes.pages_per_seq)
    begun = time.perf_counter()
    programs, scratch = _compile(fit, mesh, shapes, report)
    seconds = time.perf_counter() - begun
    cache.fits(scratch)
    shapes = cache.shapes(fit.backend, fit.footprint.adapter_sizes)
    tokens = min(tokens_a_sequence, shapes.max_model_len)
    states = 0 if shapes.cache.states is None else shapes.cache.states.num_bytes
    drafts = DRAFTS if config.speculation is None else config.speculation.num_speculative_tokens
    return ChipPlan(
        model=str(path),
        topology=topology,
        chip=devices[0].device_kind,
        chips=len(devices),
        tensor_parallel_size=mesh.size,
        hbm=chip.hbm_bytes,
        budget=fit.budget,
        weights=fit.footprint.weight_bytes,
        draft_weights=fit.footprint.draft_bytes,
        form=in_words(fit.quantization, partition, fit.weight_format) if fit.quantization else fit.dtype.name,
        scratch=cache.reserved - cache.earlier_bytes,
        earlier=cache.earlier_bytes,
        pages=shapes.cache.num_bytes - states,
        states=states,
        num_states=0 if shapes.cache.states is None else shapes.cache.states.num_slots,
        num_pages=shapes.cache.num_pages,
        adapters=fit.footprint.adapter_bytes,
        max_loras=config.max_loras if config.enable_lora else 0,
        host_pages=0 if shapes.host is None else shapes.host.num_slots,
        host_states=0 if shapes.host is None or shapes.host.states is None else shapes.host.states.num_slots,
        host_bytes=0 if shapes.host is None else shapes.host.num_bytes,
        host_page_seconds=shapes.cache.bytes_per_page / chip.host_bandwidth,
        page_size=shapes.cache.page_size,
        context_tokens=_capacity(shapes),
        max_model_len=shapes.max_model_len,
        tokens_a_sequence=tokens,
        functions=[one.report for one in programs],
        compile_seconds=seconds,
        decode=decode_steps(fit, programs, shapes, tokens),
        prompts=prompt_steps(fit, programs, shapes, tokens),
        verified=[] if states and config.speculation is None else decode_steps(fit, programs, shapes, tokens, drafts),
    )


def compiled_steps(
    config: EngineConfig, path: Path, topology: str, tokens: int, names: Collection[str]
) -> tuple[ChipFit, dict[str, CompiledProgram]]:
    """The programs of these names alone, of the smallest bucket that holds a step.

    Raises as ``plan_chips`` does.
    """
    devices = chips_of(topology_of(topology))
    fit = _fit(config, path, devices)
    mesh = DeviceMesh(tuple(devices[: fit.partition.devices]))
    shapes = fit.planner().shapes(fit.backend, fit.footprint.adapter_sizes)
    manager, arrays = _manager(fit, mesh, shapes)
    layout = shapes.layout(min(bucket for bucket in shapes.buckets if bucket >= tokens))
    programs = [program for program in manager.programs(layout) if program.name in names]
    return fit, {one.name: CompiledProgram(compile_program(one), arrays) for one in programs}


def _capacity(shapes: StepShapes) -> int:
    """Tokens in all pages, if sequences are as long as may be."""
    longest = pages_for(shapes.max_model_len, shapes.cache.page_size) * shapes.cache.page_size
    return shapes.cache.num_usable_pages * longest // shapes.groups.pages_of(longest)


def _known(device: Device) -> Chip:
    if device.device_kind not in CHIPS:
        raise ConfigurationError(f"nothing is known of {device.device_kind}: known are {', '.join(CHIPS)}")
    return CHIPS[device.device_kind]


def _fit(config: EngineConfig, path: Path, devices: list[Device]) -> ChipFit:
    """The model, and the draft model if there is one, on the chips of a topology."""
    chip = _known(devices[0])
    dtype = np.dtype(jnp.bfloat16 if config.dtype == "auto" else config.dtype)
    model, of_draft = read_config_file(path), config.of_draft_model
    fit = ChipFit(config, _partition(config, model, len(devices)), chip, dtype)
    if of_draft is None:
        return fit
    draft = read_draft(config, of_draft, model, lambda: read_config_file(of_draft.directory / "config.json"))
    return replace(fit, draft=ChipFit(of_draft, split(draft, fit.partition.devices), chip, dtype))


def _manager(
    fit: ChipFit, mesh: DeviceMesh, shapes: StepShapes, on_compiled: Callable[[Compilation], None] = lambda _: None
) -> tuple[ExecutionManager, LargeArrays]:
    """What compiles the functions of a daemon, and the arrays that these have."""
    decoder = abstract_decoder(fit.partition, fit.weight_format, mesh=mesh)
    assert isinstance(decoder, Decoder)
    of_draft = fit.draft
    draft = None if of_draft is None else abstract_decoder(of_draft.partition, of_draft.weight_format, mesh=mesh)
    manager = ExecutionManager(decoder, shapes, fit.backend, mesh, on_compiled, draft=draft)
    return manager, large_arrays(decoder, fit.backend, mesh, shapes)


def _partition(config: EngineConfig, model: ModelSpec, chips: int) -> Partition:
    asked = config.tensor_parallel_size
    if asked is not None and asked > chips:
        raise ConfigurationError(
            f"tensor_parallel_size {asked} is more than the {chips} chips of the topology: lower it"
        )
    return split(model, asked or most_devices(model, chips))


def _compile(fit: ChipFit, mesh: DeviceMesh, shapes: StepShapes, report: Report) -> tuple[list[CompiledProgram], int]:
    """Every function that a daemon compiles before READY, in order of completion, and the most bytes that a step
    takes besides weights and pages."""
    programs: list[CompiledProgram] = []

    def add(compilation: Compilation) -> None:
        programs.append(CompiledProgram(compilation, arrays))

    manager, arrays = _manager(fit, mesh, shapes, add)
    manager.compile(report, staged=fit.config.staged_readiness)
    return programs, manager.scratch_bytes


def large_arrays(decoder: Decoder, backend: Backend, mesh: DeviceMesh, shapes: StepShapes) -> LargeArrays:
    """The weights, pages and logits of a decoder's steps."""
    partition, sharding = decoder.partition, mesh.sharding(*LOGITS)
    logits = jax.ShapeDtypeStruct((shapes.max_num_seqs, partition.padded_vocab_size), jnp.float32, sharding=sharding)
    pages = jax.tree.leaves(backend.abstract_cache(shapes.cache, mesh))
    weights = tuple(jax.tree.leaves(nnx.state(decoder)))
    states, experts = shapes.cache.states, tuple(_expert_stacks(decoder))
    sizes = (shapes.cache.num_pages,) if states is None else (shapes.cache.num_pages, states.num_slots)
    return LargeArrays(weights, tuple(pages), logits, partition.model.num_layers, experts, sizes)


def _expert_stacks(decoder: Decoder) -> Iterator[ExpertStack]:
    for layer in decoder.layers:
        for block in layer.blocks if isinstance(layer, LayerStack) else ():
            if isinstance(mlp := block.mlp, ExpertsMLP):
                kernels = mlp.gate_up_kernel.get_value(), mlp.down_kernel.get_value()
                yield from (ExpertStack(leaf, mlp.spec) for leaf in jax.tree.leaves(kernels))
