"""Engines of tiny models with slots for adapters, and the adapters of tests/adapter_files.py in them."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from adapter_files import SETS, write_adapter
from checkpoints import build_checkpoint
from loading import load

from caching.page_manager import HBMPageManager
from engine.adapters.slot_arrays import WRITE_ADAPTER, AdapterSizes
from engine.devices.mesh import DeviceMesh
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.needs import Need
from engine.sampling_params import SamplingParams
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.estimates.step_costs import StepCosts, sizes_up_to
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend import Backend
from engine.step.backend_choice import choose_backend
from engine.step.execution_manager import ExecutionManager
from engine.step.forward_programs import ADAPTED_FORWARD, FORWARD, WRITE_SLOTS
from engine.step.runner import eSurgeRunner
from engine.step.sampling_programs import LOGPROBS
from engine.step.step_shapes import StepShapes

GOLDENS = Path(__file__).parent / "goldens" / "adapters"
CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_PAGES = 8, 4, 52, 64
FLOAT32 = np.dtype(np.float32)
TOLERANCE, OF_ILL_CONDITIONED = 1e-4, {"qwen3_next": 4e-4}
"""Of log-probabilities. In float64 torch itself finds those of this random model 1.6e-4 from its own in float32."""
EXPERTS = ("mixtral", "gpt_oss", "llama4", "qwen2_moe", "qwen3_moe")
"""Variants whose experts have adapters."""
WITH_EXPERTS = ("q_proj", "k_proj", "v_proj", "o_proj", "experts")
NEEDED = (FORWARD, ADAPTED_FORWARD, LOGPROBS, WRITE_SLOTS, WRITE_ADAPTER)


class UnlearnedCosts(StepCosts):
    """Learns nothing of the steps' times, so that two engines cut prompts in the same places: XLA's
    products round by the number of rows."""

    def learn(self, num_tokens, seconds, passes=0, *, has_prompts=False):
        """Nothing."""


class FewPrograms(ExecutionManager):
    """Compiles only what greedy requests with log-probabilities run."""

    def programs(self, layout):
        """A bucket's forward passes and its greedy sampler."""
        kept = *NEEDED, self.sampling.sampler(Need(0))
        return [program for program in super().programs(layout) if program.name in kept]


@dataclass
class AdapterEngines:
    """Compiled steps of a variant; ``engine`` makes an engine of them, and ``directories`` has its adapters."""

    manager: ExecutionManager
    directories: dict[str, Path]
    cases: list[dict[str, Any]]
    tolerance: float
    has_states: bool = False
    num_slots: int = 0
    runners: list[eSurgeRunner] = field(default_factory=list)

    def engine(
        self, *, run_ahead: int = 1, num_pages: int | None = None, runner: eSurgeRunner | None = None
    ) -> oEngine:
        """An engine without adapters."""
        shapes = self.manager.shapes
        pages = HBMPageManager(num_pages or shapes.cache.num_pages)
        slots = HBMPageManager(self.num_slots) if self.has_states else None
        states = SequenceStates(slots, shapes.cache.page_size, MAX_NUM_SEQS) if slots else None
        assert shapes.adapters is not None
        scheduler = InferenceScheduler(
            SequenceMemory(pages, shapes.groups, states),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=CHUNK,
            adapters=AdapterSlots(shapes.adapters.max_loras),
            step_costs=UnlearnedCosts(sizes_up_to(CHUNK)),
        )
        limits = ServingLimits(MAX_MODEL_LEN, 144, ())
        return oEngine(scheduler, runner or eSurgeRunner(self.manager, 0), limits, run_ahead=run_ahead)


def adapter_engines(
    place: Path,
    golden: str,
    *,
    backend: Backend | None = None,
    page_size: int = 4,
    devices: int = 1,
    max_loras: int = 2,
    max_lora_rank: int = 64,
    manager: type[ExecutionManager] = FewPrograms,
    dtype: np.dtype[Any] = FLOAT32,
) -> AdapterEngines:
    """The compiled steps of a golden's variant, and its adapters in directories below ``place``."""
    variant, adapters = SETS[golden]
    directory = build_checkpoint(place / "model", variant)
    model = read_model_config(directory)
    backend = backend or choose_backend(page_size, model.head_dim, FLOAT32, latents=model.has_latents)
    one_page = backend.one_page(split(model, devices), page_size, FLOAT32)
    num_slots = 1 + 2 * MAX_NUM_SEQS
    states = one_page.states and replace(one_page.states, num_slots=num_slots)
    pool = replace(one_page, num_pages=1 + NUM_PAGES * len(one_page.windows), states=states)
    targets = WITH_EXPERTS if variant in EXPERTS else ()
    if variant == "qwen2_moe":
        targets += ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")
    sizes = AdapterSizes(max_loras, max_lora_rank, dtype, backend.layout, targets)
    shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, pool, smallest_step=MAX_NUM_SEQS, adapters=sizes)
    form = backend.weight_format(FLOAT32)
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    compiled = manager(load(directory, form, devices), shapes, backend, mesh)
    compiled.compile(lambda progress: None)
    directories = {name: write_adapter(place / name, variant, kind) for name, kind in adapters.items()}
    cases = json.loads((GOLDENS / f"{golden}.json").read_text())["cases"]
    tolerance = OF_ILL_CONDITIONED.get(variant, TOLERANCE)
    return AdapterEngines(compiled, directories, cases, tolerance, states is not None, num_slots)


def request(
    number: str, case: dict[str, Any], adapter_id: int, *, tokens: int | None = None, **params: Any
) -> Sequence:
    """A golden case, or the first tokens of it, as a request that asks for log-probabilities."""
    asked = SamplingParams(temperature=0, logprobs=0, **params)
    salt = adapter_id.to_bytes(4, "big")
    return Sequence(
        number, case["prompt"], asked, frozenset(), tokens or len(case["tokens"]), seed=0, adapter_id=adapter_id, salt=salt
    )  # fmt: skip


class Answers:
    """What an engine gives, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}

    def take(self, outputs: list[Any]) -> None:
        """The outputs of a step."""
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            found = [one.logprobs[0] for one in output.logprobs]
            self.logprobs.setdefault(output.request_id, []).extend(found)
            if output.error is not None:
                self.errors[output.request_id] = output.error

    def run(self, engine: oEngine) -> "Answers":
        """Step an engine until nothing is left."""
        while engine.has_work:
            self.take(engine.step())
            engine.check_integrity()
        return self

    def assert_golden(self, number: str, case: dict[str, Any], tolerance: float) -> None:
        """A request has its golden tokens, and each its golden log-probability."""
        assert self.tokens[number] == case["tokens"], f"{number} has another's tokens ({case['adapter']!r})"
        np.testing.assert_allclose(self.logprobs[number], case["logprobs"], atol=tolerance)
