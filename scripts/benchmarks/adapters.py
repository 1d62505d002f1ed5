"""What adapters cost a step on this machine: whole steps of an engine with adapters in its rows, beside those without.

The engine runs in a child, which is this module too. Turns alternate, so that whatever else the machine does is in all cases.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.build import build_engine
from engine.config import EngineConfig
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence as Generated
from scripts.benchmarks.compiled.lora import ADAPTERS, RANK, ROWS
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.models import model_directory
from scripts.benchmarks.processes.child import answer_all, ask_once

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
WITHOUT = "without"
PROMPT, TOKENS, UNSETTLED = 4, 60, 8
"""Tokens of a prompt and of an output; steps at either end of a turn that are not counted."""


def measure_adapters(model: str, repeats: int) -> Iterator[Figure]:
    """Milliseconds of a step of ROWS rows, each with one of ADAPTERS adapters of all of a layer's products, or without."""
    turns = ask_once("scripts.benchmarks.adapters", [str(model_directory(model)), repeats], dict[str, list[float]])
    group = f"a step of {ROWS} rows, {ADAPTERS} adapters of rank {RANK}, {model}"
    without = [MILLISECONDS * seconds for seconds in turns[WITHOUT]]
    yield figure(group, WITHOUT, "ms", without, more_is_better=False)
    for name in DTYPES:
        values = [MILLISECONDS * seconds for seconds in turns[name]]
        yield figure(group, f"of {name}", "ms", values, more_is_better=False, others={WITHOUT: without})
        more = [100 * (one / other - 1) for one, other in zip(values, without, strict=True)]
        yield figure(group, f"of {name}, more than without", "%", more, more_is_better=False)


def _measure(question: list[Any]) -> dict[str, list[float]]:
    """The median step of each turn, in seconds, by case."""
    model, repeats = Path(question[0]), question[1]
    engine = build_engine(
        EngineConfig(
            model=str(model),
            enable_lora=True,
            max_loras=len(DTYPES) * ADAPTERS,
            max_lora_rank=RANK,
            max_num_seqs=ROWS,
            max_num_batched_tokens=ROWS,
            max_model_len=256,
            enable_prefix_caching=False,
        ),
        lambda _: None,
    )
    cases: dict[str, Sequence[int]] = {WITHOUT: [0], **{name: _add(engine, model, DTYPES[name]) for name in DTYPES}}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, adapters in cases.items():
            step = _turn(engine, adapters)
            if turn:  # the first has read no adapter before
                found[name].append(step)
    return found


def _add(engine: oEngine, model: Path, dtype: np.dtype[Any]) -> list[int]:
    """The uids of random adapters of all products of a layer, saved in this dtype."""
    uids = []
    with safe_open(model / "model.safetensors", "np") as checkpoint:
        shapes = {name: checkpoint.get_slice(name).get_shape() for name in checkpoint.keys()}  # noqa: SIM118
    kernels = {name: shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2}
    for seed in range(ADAPTERS):
        rng, tensors = np.random.default_rng(seed), {}
        for name, (outputs, inputs) in kernels.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = (rng.normal(size=(RANK, inputs)) / 30).astype(dtype)
            tensors[f"{stem}.lora_B.weight"] = (rng.normal(size=(outputs, RANK)) / 300).astype(dtype)
        modules = sorted({name.split(".")[-2] for name in kernels})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules}
        with TemporaryDirectory(prefix="odriver-bench-") as directory:
            Path(directory, "adapter_config.json").write_bytes(msgspec.json.encode(config))
            save_file(tensors, Path(directory, "adapter_model.safetensors"))
            adapter = engine.read_adapter(directory)
        engine.add_adapter(adapter)
        uids.append(adapter.uid)
    return uids


def _turn(engine: oEngine, adapters: Sequence[int]) -> float:
    """The median of the steps in which all rows decode, in seconds."""
    rng, params = np.random.default_rng(0), SamplingParams(temperature=0)
    for row, uid in enumerate(islice(cycle(adapters), ROWS)):
        prompt = rng.integers(300, 2000, size=PROMPT).tolist()
        of_adapter = {"adapter_id": uid, "salt": uid.to_bytes(4, "big")} if uid else {}
        engine.add(Generated(str(row), prompt, params, frozenset(), TOKENS, seed=0, **of_adapter))
    ends = []
    while engine.has_work:
        engine.step()
        ends.append(time.perf_counter())
    return float(np.median(np.diff(ends)[UNSETTLED:-UNSETTLED]))


if __name__ == "__main__":
    answer_all(_measure)
