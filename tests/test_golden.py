"""The engine against transformers on torch: greedy tokens equal and log-probabilities within 1e-4, for every family.

By XLA's operations and by the CPU's kernels, and for one of them with pages as a TPU has them. The goldens' prompts are shorter and longer than a page (4 or 16), a
chunk (8) and the sliding windows (8).
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
from tpu_twins import PallasTwin

from caching.page_manager import HBMPageManager
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS
from engine.config import ServingLimits
from engine.mesh import DeviceMesh
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.step.backend import choose_backend, tpu_backend, xla_backend
from engine.step.execution_manager import ExecutionManager
from engine.step.layout import StepShapes
from engine.step.runner import eSurgeRunner

GOLDENS = Path(__file__).parent / "goldens"
CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_PAGES = 8, 4, 52, 65
SMALL_POOL = {4: 16, 16: 6}
"""Pages, by their size, with which the longest case just fits alone, so that all at once must preempt."""
V5E = CHIPS["TPU v5 lite"]
FLOAT32 = np.dtype(np.float32)
XLA = xla_backend(FLOAT32)
TPU = replace(tpu_backend(V5E, PALLAS), attention=PallasTwin())
PLAINEST = {("llama2", 16), ("mistral", 4), ("qwen2", 16), ("qwen3", 4), ("gemma2", 16), ("mixtral", 16)}
"""Of every family a variant and the size of its pages."""
BACKENDS = [
    *(
        pytest.param(
            (variant, page_size, backend, 1), marks=() if (variant, page_size) in PLAINEST else pytest.mark.thorough
        )
        for variant in sorted(VARIANTS)
        for page_size, backend in ((4, XLA), (16, None))
    ),
    pytest.param(("qwen2_sliding", 4, TPU, 1), marks=pytest.mark.thorough),
    pytest.param(("qwen3_sharded", 4, TPU, 2), marks=pytest.mark.thorough),
    pytest.param(("gemma2", 4, TPU, 1), marks=pytest.mark.thorough),
    pytest.param(("gemma2", 4, XLA, 2), marks=pytest.mark.thorough),
    pytest.param(("mixtral", 4, TPU, 1), marks=pytest.mark.thorough),
    pytest.param(("mixtral", 4, XLA, 2), marks=pytest.mark.thorough),
]


class RecordingManager(ExecutionManager):
    """Keeps the logits that each step gives."""

    def forward(self, layout):
        """The step, behind a recorder."""
        step = super().forward(layout)

        def recording(*arguments):
            cache, logits, *rest = step(*arguments)
            self.logits = np.asarray(logits)[:, : self.num_tokens]
            return cache, logits, *rest

        return recording


class RecordingRunner(eSurgeRunner):
    """Knows the log-probabilities of every token drawn, by request and position."""

    def __init__(self, manager, *rest):
        super().__init__(manager, *rest)
        self.logprobs = {}

    def dispatch(self, plan):
        """Dispatch, and note what the rows that sample were given."""
        step = super().dispatch(plan)
        logprobs = np.asarray(jax.nn.log_softmax(self._manager.logits, axis=-1))
        for row, sequence in enumerate(plan.sequences):
            if plan.samples[row]:
                self.logprobs[sequence.request_id, plan.starts[row] + plan.counts[row]] = logprobs[row]
        return step


@pytest.fixture(
    scope="module",
    params=BACKENDS,
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
    backend = backend or choose_backend(page_size, model.attention.head_dim, FLOAT32)
    metadata = replace(backend.one_page(split(model, devices), page_size, FLOAT32), num_pages=NUM_PAGES)
    shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, metadata)
    decoder = load(directory, backend.weight_format(FLOAT32), devices)
    manager = RecordingManager(decoder, shapes, backend, mesh)
    manager.num_tokens = model.vocab_size
    manager.compile(lambda progress: None)
    return (
        json.loads((GOLDENS / f"{variant}.json").read_text())["cases"],
        manager,
        shapes,
        partial(RecordingRunner, manager, 0),
    )


def run(compiled, cases, *, num_pages=NUM_PAGES, run_ahead=1):
    """All cases at once through an engine; tokens by case, the runner's log-probabilities, and the engine."""
    _, _, shapes, make_runner = compiled
    pages = HBMPageManager(num_pages)
    scheduler = InferenceScheduler(
        pages, page_size=shapes.cache.page_size, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=CHUNK
    )
    runner = make_runner()
    limits = ServingLimits(MAX_MODEL_LEN, 144, ())
    engine = oEngine(scheduler, runner, pages, limits, run_ahead=run_ahead)
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

    tokens, logprobs, engine = run(
        compiled, cases, num_pages=SMALL_POOL[compiled[2].cache.page_size], run_ahead=run_ahead
    )

    assert_golden(cases, tokens, logprobs)
    assert engine.stats().preemptions > 0
