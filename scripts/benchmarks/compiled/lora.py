"""What adapters cost by the compiled program, on TPUs that are not there: the step with adapters beside the one without."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from engine.config import EngineConfig
from engine.planner.chip_planner import compiled_steps
from engine.planner.compiled_function import CompiledProgram
from engine.planner.ici import ROUNDS
from engine.step.forward_programs import ADAPTED_FORWARD, FORWARD
from scripts.benchmarks.figures.figure import Figure, figure

CONFIGS = Path(__file__).parents[3] / "tests" / "configs"
PLANS = (("Llama-3-8B", "v6e:1x1"), ("Llama-3-8B", "v5e:2x4"))
"""Models and topologies."""
MOST_MORE = 5.0
"""Limit of what the step moves more, in percent of the weights."""
ROWS, ADAPTERS, RANK = 32, 8, 16


@dataclass(frozen=True)
class Cost:
    """The step of ROWS rows without adapters and with them, on one chip."""

    plain: CompiledProgram
    adapted: CompiledProgram
    weights: int
    """Bytes of the weights."""
    adapters: int
    """Bytes of the slots."""

    @property
    def more_bytes(self) -> int:
        """Bytes that the step with adapters moves more."""
        plain, adapted = (one.traffic(0, ROWS).moved for one in (self.plain, self.adapted))
        return adapted.read + adapted.written - plain.read - plain.written


def measure_lora() -> Iterator[Figure]:
    """Every plan. Raises ConfigurationError where libtpu is not installed."""
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has is not what is planned for
    for model, topology in PLANS:
        cost, name = cost_of(model, topology), f"{model} on {topology}, {ADAPTERS} adapters of rank {RANK}, {ROWS} rows"
        more = 100 * cost.more_bytes / cost.weights
        yield figure(name, "bytes moved more, of the weights'", "%", [more], more_is_better=False, limit=MOST_MORE)
        yield figure(name, "bytes of the slots, of the weights'", "%", [100 * cost.adapters / cost.weights])
        copies = len(cost.adapted.report.copies)
        yield figure(name, "copies of pages or weights", "", [copies], more_is_better=False, limit=0)
        rounds = _rounds(cost.adapted) - _rounds(cost.plain)
        yield figure(name, "rounds of exchanges a layer more", "", [rounds], more_is_better=False, limit=0)


def cost_of(model: str, topology: str) -> Cost:
    """Compile both steps of a model for a topology."""
    config = EngineConfig(enable_lora=True, max_loras=ADAPTERS, max_lora_rank=RANK, max_num_seqs=ROWS)
    fit, programs = compiled_steps(config, CONFIGS / f"{model}.json", topology, ROWS, (FORWARD, ADAPTED_FORWARD))
    return Cost(programs[FORWARD], programs[ADAPTED_FORWARD], fit.footprint.weight_bytes, fit.footprint.adapter_bytes)


def _rounds(program: CompiledProgram) -> float:
    """Of a layer: an all-reduce has two, a reduce-scatter and an all-gather."""
    return sum(ROUNDS.get(each.kind, 1) * each.per_layer for each in program.report.exchanges)
