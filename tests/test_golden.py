"""The engine against transformers on torch: greedy tokens equal and log-probabilities within 1e-4, for every family.

By XLA's operations and by the CPU's kernels, and for one of them with pages as a TPU has them. The goldens' prompts are shorter and longer than a page (4 or 16), a
chunk (6) and the sliding windows (8).
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint
from loading import load
from moe_checkpoints import MOE_VARIANTS
from state_checkpoints import STATE_VARIANTS
from tpu_twins import PallasTwin

from caching.attention.xla_attention import XLAAttention
from caching.attention.xla_latents import XLALatentAttention
from caching.page_manager import HBMPageManager
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import LATENTS, PALLAS
from engine.devices.mesh import DeviceMesh
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.needs import Need
from engine.sampling_params import SamplingParams
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import choose_backend, tpu_backend, xla_backend
from engine.step.execution_manager import ExecutionManager
from engine.step.forward_programs import FORWARD, WRITE_SLOTS
from engine.step.runner import eSurgeRunner
from engine.step.step_shapes import StepShapes

GOLDENS = Path(__file__).parent / "goldens"
CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN = 6, 4, 52
NUM_PAGES = 64
"""For each group of layers, besides the sink."""
NUM_SLOTS = 1 + 2 * MAX_NUM_SEQS
"""For recurrent states: the sink's, and those of running sequences and kept ones."""
SPARE = {4: 3, 16: 2}
"""Pages, by their size, besides those of the longest sequence alone, so that all at once must preempt."""
V5E = CHIPS["TPU v5 lite"]
FLOAT32 = np.dtype(np.float32)
XLA = xla_backend(FLOAT32)
TPU = replace(tpu_backend(V5E, PALLAS), attention=PallasTwin())
OF_LATENTS = {id(XLA): xla_backend(FLOAT32, latents=True), id(TPU): tpu_backend(V5E, LATENTS)}
"""Of models with latents, in the place of the others."""
PLAINEST = {("llama2", 16), ("mistral", 4), ("qwen3", 16), ("gemma2", 16), ("gpt_oss", 16), ("deepseek_v3", 16)}
PLAINEST |= {("qwen3_next", 16)}
"""Of every mechanism of an engine a variant and the size of its pages. What else is in a family's layers test_decoder shows."""
OF_DECODER = {("qwen3", 16)}
"""What else they have is in their layers alone: test_decoder has them in every run."""
OF_XLA = ("exaone4", "gemma3", "gemma4", "llama2_bfloat16")
ON_TWO_DEVICES = ("deepseek_v3", "falcon_h1", "gpt2", "gpt_bigcode", "gpt_oss", "lfm3", "llama4", "mimo_v2", "mixtral")
ON_TWO_DEVICES += ("nemotron_h", "olmo2", "phi3", "qwen3_next", "stablelm")
OF_TPU = ("deepseek_v3", "falcon_h1", "gemma4", "gpt_oss", "lfm3", "llama4", "mimo_v2", "mixtral", "qwen3_next")
"""Variants of every mechanism, which thorough runs try there; those of all others are exhaustive."""
OF_OTHERS = ("arcee", "axk1", "bamba", "cohere2_moe", "cwm", "deepseek_v3_plain", "dots1", "ernie4_5")
OF_OTHERS += ("glm4_moe_plain", "granite_moe_shared", "granite_moe_swa", "granite_swa", "helium", "hunyuan_moe")
OF_OTHERS += ("hy_v3", "hyperclovax", "mellum", "mistral4", "nemotron", "olmoe", "qwen2_5_vl", "qwen3_moe_plain")
OF_OTHERS += ("qwen3_vl_moe", "seed_oss", "smollm3", "solar_open", "vaultgemma", "youtu", "gemma4_unified")
OF_OTHERS += ("olmo_hybrid",)
"""Variants of which other variants have every mechanism: exhaustive on the CPU's kernels, too. All others are tried there."""


def backends():
    """(variant, page size, backend, devices) of all that there is, and when each is tried."""
    for variant in sorted(VARIANTS):
        shards = variant in MOE_VARIANTS or variant in STATE_VARIANTS or variant in ON_TWO_DEVICES
        cells = [
            (4, XLA, 1, variant in OF_XLA),
            (16, None, 1, variant not in OF_OTHERS),
            (4, TPU, 1, variant in OF_TPU),
        ]
        cells += [(4, XLA, 2, variant in ON_TWO_DEVICES)] * shards
        cells += [(4, TPU, 2, True)] * (variant in ("deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_sharded"))
        for page_size, backend, devices, is_thorough in cells:
            mark = pytest.mark.thorough if is_thorough else pytest.mark.exhaustive
            is_default = devices == 1 and backend is not TPU and (variant, page_size) in PLAINEST - OF_DECODER
            yield pytest.param((variant, page_size, backend, devices), marks=() if is_default else mark)


class RecordingManager(ExecutionManager):
    """Keeps the logits that each step gives, and compiles only what greedy requests run."""

    def programs(self, layout):
        """A bucket's forward pass and its greedy sampler."""
        kept = FORWARD, WRITE_SLOTS, self.sampling.sampler(Need(0))
        return [program for program in super().programs(layout) if program.name in kept]

    def executable(self, name, size):
        """A step behind a recorder."""
        step = super().executable(name, size)

        def recording(*arguments):
            cache, slots, logits, *rest = step(*arguments)
            self.logits = np.asarray(logits)[:, : self.num_tokens]
            return cache, slots, logits, *rest

        return recording if name == FORWARD else step


class RecordingRunner(eSurgeRunner):
    """Knows the log-probabilities of every token drawn, by request and position."""

    def __init__(self, manager, *rest):
        super().__init__(manager, *rest)
        self.logprobs = {}

    def dispatch(self, plan):
        """Dispatch, and note what the rows that sample were given."""
        step = super().dispatch(plan)
        assert any(plan.samples) or not self._manager.logits.any(), "logits that nobody needs"
        logprobs = np.asarray(jax.nn.log_softmax(self._manager.logits, axis=-1))
        for row, sequence in enumerate(plan.sequences):
            if plan.samples[row]:
                self.logprobs[sequence.request_id, plan.starts[row] + plan.counts[row]] = logprobs[row]
        return step


@pytest.fixture(
    scope="module",
    params=[*backends()],
    ids=lambda param: f"{param[0]}-pages_of_{param[1]}{'_TPU' * (param[2] is TPU)}-{param[3]}_devices",
)
def compiled(request, tmp_path_factory):
    """A variant's cases, its compiled steps and their shapes: compiled once for all the tests of the variant.

    Pages of 4 are XLA's, those of 16 the CPU kernels' where they know the head_dim.
    """
    variant, page_size, backend, devices = request.param
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    directory = build_checkpoint(tmp_path_factory.mktemp(variant), variant)
    model = read_model_config(directory)
    if model.has_latents and backend is not None:
        backend = OF_LATENTS[id(backend)]
    backend = backend or choose_backend(page_size, model.head_dim, FLOAT32, latents=model.has_latents)
    one_page = backend.one_page(split(model, devices), page_size, FLOAT32)
    states = one_page.states and replace(one_page.states, num_slots=NUM_SLOTS)
    metadata = replace(one_page, num_pages=1 + NUM_PAGES * len(one_page.windows), states=states)
    of_xla = isinstance(backend.attention, XLAAttention | XLALatentAttention)
    # Each size takes seconds to compile. XLA does the same for any number of rows, and of kernels PLAINEST have all sizes,
    # but in a default run one of them alone.
    all_sizes = PLAINEST if request.config.getoption("compile_as_served") else {("llama2", 16)}
    smallest_step = 1 if (variant, page_size) in all_sizes and not of_xla else MAX_NUM_SEQS
    shapes = StepShapes(
        MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, metadata, smallest_step=smallest_step,
        skips_padding=backend.skips_padding and states is None,
    )  # fmt: skip
    decoder = load(directory, backend.weight_format(FLOAT32), devices)
    manager = RecordingManager(decoder, shapes, backend, mesh)
    manager.num_tokens = model.vocab_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.step.inputs.layout.LEAST_LOGITS", 0)  # as steps have few rows here
        manager.compile(lambda progress: None)
    return (
        json.loads((GOLDENS / f"{variant}.json").read_text())["cases"],
        manager,
        shapes,
        partial(RecordingRunner, manager, 0),
    )


def run(compiled, cases, *, num_pages=None, run_ahead=1):
    """All cases at once through an engine; tokens by case, the runner's log-probabilities, and the engine."""
    _, _, shapes, make_runner = compiled
    pages = HBMPageManager(num_pages or shapes.cache.num_pages)
    slots = HBMPageManager(NUM_SLOTS) if shapes.cache.states else None
    states = SequenceStates(slots, shapes.cache.page_size, MAX_NUM_SEQS) if slots else None
    memory = SequenceMemory(pages, shapes.groups, states)
    scheduler = InferenceScheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=CHUNK)
    runner = make_runner()
    limits = ServingLimits(MAX_MODEL_LEN, 144, ())
    engine = oEngine(scheduler, runner, limits, run_ahead=run_ahead)
    tokens = {}
    for number, case in enumerate(cases):
        greedy = SamplingParams(temperature=0)
        engine.add(Sequence(str(number), case["prompt"], greedy, frozenset(), len(case["tokens"]), seed=0))
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    assert engine.stats().pages_owned == 0
    return tokens, runner.logprobs, engine


def assert_golden(cases, tokens, logprobs):
    """Every case has its golden tokens, and each of them its golden log-probability."""
    for number, case in enumerate(cases):
        assert tokens[str(number)] == case["tokens"]
        actual = [
            logprobs[str(number), len(case["prompt"]) + index][token] for index, token in enumerate(case["tokens"])
        ]
        np.testing.assert_allclose(actual, case["logprobs"], atol=1e-4)


def test_alone(compiled):
    """Each prompt by itself gives what transformers gives."""
    for case in compiled[0]:
        tokens, logprobs, _ = run(compiled, [case])
        assert_golden([case], tokens, logprobs)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_all_at_once(compiled, run_ahead):
    """All prompts together, more of them than slots, give each what it gets alone."""
    cases = compiled[0]

    tokens, logprobs, engine = run(compiled, cases, run_ahead=run_ahead)

    assert_golden(cases, tokens, logprobs)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_with_a_pool_so_small_that_sequences_are_preempted(compiled, run_ahead):
    """Preempted sequences are computed anew and go on as if nothing had happened."""
    cases = compiled[0]

    groups = compiled[2].groups
    num_pages = groups.pages_of(MAX_MODEL_LEN) + SPARE[groups.page_size]

    tokens, logprobs, engine = run(compiled, cases, num_pages=num_pages, run_ahead=run_ahead)

    assert_golden(cases, tokens, logprobs)
    assert engine.stats().preemptions > 0
