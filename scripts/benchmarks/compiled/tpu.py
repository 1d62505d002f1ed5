"""What the compiler says of our steps on TPUs that are not there, beside what they have to reach (`odriver plan` for several)."""

from collections.abc import Iterator
from pathlib import Path

import jax

from engine.config import EngineConfig
from engine.planner.chip_plan import ChipPlan
from engine.planner.chip_planner import plan_chips
from scripts.benchmarks.figures.figure import Figure, figure

CONFIGS = Path(__file__).parents[3] / "tests" / "configs"
PLANS = (
    ("Llama-3-8B", "v5e:2x4", None),
    ("Llama-3-8B", "v6e:2x4", None),
    ("Llama-3-8B", "v5e:2x4", "int4"),
    ("Llama-3-70B", "v5e:4x8", None),
    ("Llama-3-70B", "v6e:4x4", None),
    ("Qwen3-30B-A3B", "v5e:2x4", None),
    ("Qwen3-30B-A3B", "v6e:2x4", None),
    ("Qwen3-30B-A3B", "v5e:2x4", "int4"),
    ("gpt-oss-20b", "v5e:2x4", None),
    ("gpt-oss-20b", "v6e:2x4", None),
)
"""Models, topologies and forms of the weights."""
ROWS, TOKENS = 64, 1024
"""Of the decoding step that is looked at."""
ALL_REDUCES_A_LAYER, READ_RATIO, SCRATCH_MIB, BUCKET_SECONDS, START_SECONDS = 2, 1.1, 64, 10, 60
MIB = 2**20


def measure_tpu(tokens: int) -> Iterator[Figure]:
    """Every plan, with all chips of its topology. Raises ConfigurationError where libtpu is not installed."""
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has is not what is planned for
    for model, topology, form in PLANS:
        config = EngineConfig(max_num_seqs=ROWS, quantization=form)
        plan = plan_chips(config, CONFIGS / f"{model}.json", topology, tokens, lambda progress: None)  # noqa: ARG005
        yield from tpu_figures(f"{model} on {topology}{f' in {form}' if form else ''}", plan)


def tpu_figures(benchmark: str, plan: ChipPlan) -> Iterator[Figure]:
    """One plan; what must not be exceeded is the limit."""
    step = plan.decode[-1]
    decodes = [one for one in plan.steps if one.size <= step.sequences]
    a_layer = [sum(each.per_layer for each in one.exchanges) for one in decodes]
    for name, unit, value, limit in (
        ("copies of pages or weights", "", sum(len(one.copies) for one in plan.functions), 0),
        ("gathers of pages, weights or logits", "", sum(len(one.gathers) for one in plan.functions), 0),
        ("all-reduces a layer", "", max(a_layer), ALL_REDUCES_A_LAYER),
        (f"read, of what {step.sequences} rows must", "", step.bytes_read / step.bytes_needed, READ_RATIO),
        ("temporary memory", "MiB", max(one.scratch_bytes for one in plan.functions) / MIB, SCRATCH_MIB),
        ("slowest bucket to compile", "s", max(one.compile_seconds for one in plan.steps), BUCKET_SECONDS),
        (f"a cold start's {len(plan.functions)} functions", "s", plan.compile_seconds, START_SECONDS),
    ):
        yield figure(benchmark, name, unit, [value], more_is_better=False, limit=limit)
    yield figure(benchmark, f"at best, {step.sequences} rows", "tokens/s", [step.tokens_per_second])
    if plan.decode[0].experts_read is not None:
        name = f"experts read by {plan.decode[0].sequences} rows, estimated"
        yield figure(benchmark, name, "%", [100 * plan.decode[0].experts_read], more_is_better=False)
