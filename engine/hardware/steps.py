"""Decoding steps of a model on this machine, beside what the plan says of them."""

import time
from collections.abc import Callable, Iterator

from caching.tpu.tpu_chip import CHIPS, Chip
from engine.build import CompiledSteps, Report, build
from engine.config import EngineConfig
from engine.hardware.measurement import Measurement, Scale
from engine.models.decoder import Decoder
from engine.oengine import oEngine
from engine.planner.chip_fit import ChipFit
from engine.planner.chip_planner import large_arrays
from engine.planner.compiled_function import CompiledProgram
from engine.planner.hlo_traffic import Moved
from engine.planner.planned_steps import decode_steps
from engine.planner.roofline import Roofline
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.served_model import Decoders, ServedModel
from engine.step.compilation import Compilation
from engine.step.execution_manager import ExecutionManager
from engine.step.step_shapes import StepShapes

STEPS = 32
"""Steps that are timed together, as they overlap."""
MARGIN = 8
"""Tokens of each sequence before and behind these."""


def measure_steps(config: EngineConfig, scale: Scale, chip: Chip, kind: str, report: Report) -> Iterator[Measurement]:
    """Steps of one sequence and of as many as there may be. ``chip`` has the device's rates.

    Raises what a start raises.
    """
    compilations: list[Compilation] = []

    def begin_compiling(served: ServedModel, made: Decoders, shapes: StepShapes) -> ExecutionManager:
        compilations.clear()
        manager = ExecutionManager(
            made.model, shapes, served.backend, served.mesh, compilations.append, draft=made.draft
        )
        decoders.append(made.model)
        manager.begin()
        return manager

    decoders: list[Decoder] = []
    begun = time.perf_counter()
    compiled, engine = build(config, report, lambda compiled: (compiled, compiled.engine()), begin_compiling)
    yield Measurement(
        section="steps", what="start of the engine", value=time.perf_counter() - begun, unit="s",
        note=f"{len(compilations)} functions, of which the compiler took {sum(one.seconds for one in compilations):.1f} s",
    )  # fmt: skip
    shapes = compiled.manager.shapes
    tokens = max(1, min(scale.tokens, shapes.max_model_len - STEPS - 2 * MARGIN))
    pages = shapes.groups.pages_of(tokens + STEPS + 2 * MARGIN)
    most = max(1, min(shapes.max_num_seqs, shapes.cache.num_usable_pages // pages))
    plan = _plan(compiled, decoders[-1], compilations, chip, kind, tokens)
    for sequences in sorted({1, most}):
        yield Measurement(
            section="steps",
            what=f"decoding, {sequences} rows of {tokens:,} tokens",
            value=1e3 * _step_seconds(engine, sequences, tokens),
            unit="ms",
            expected=1e3 * plan(sequences),
            note="the plan's" if kind in CHIPS else "at best, by the rate of memory measured here",
        )


def _plan(
    compiled: CompiledSteps, decoder: Decoder, compilations: list[Compilation], chip: Chip, kind: str, tokens: int
) -> Callable[[int], float]:
    """The seconds of a step of so many sequences; the nearest number that was planned."""
    served, shapes = compiled.served, compiled.manager.shapes
    fit = ChipFit(served.config, served.partition, chip, served.weights_dtype)
    if kind not in CHIPS:
        forms, slot = (served.weight_format, served.kv_dtype), shapes.cache.bytes_per_slot
        roofline = Roofline(chip, served.partition, *forms, served.footprint.weight_bytes, slot)
        return lambda sequences: roofline.step(sequences, tokens, Moved(), 0.0).bytes_needed / chip.hbm_bandwidth
    arrays = large_arrays(decoder, served.backend, served.mesh, shapes)
    planned = decode_steps(fit, [CompiledProgram(one, arrays) for one in compilations], shapes, tokens)

    def nearest(sequences: int) -> float:
        step = min(planned, key=lambda one: abs(one.sequences - sequences))
        return step.sequences / step.tokens_per_second

    return nearest


def _step_seconds(engine: oEngine, sequences: int, tokens: int) -> float:
    """The mean of steps that follow each other while all sequences decode."""
    params = SamplingParams(temperature=0)
    running = [
        Sequence(f"step {number}", [1 + number] * tokens, params, frozenset(), STEPS + 2 * MARGIN, seed=0)
        for number in range(sequences)
    ]
    for sequence in running:
        engine.add(sequence)
    while any(not sequence.output_token_ids for sequence in running):
        engine.step()
    for _ in range(MARGIN // 2):
        engine.step()
    begun = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    taken = (time.perf_counter() - begun) / STEPS
    while engine.has_work:
        engine.step()
    return taken
