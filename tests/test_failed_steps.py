"""Steps that fail on the real device: who was in one is told, everybody else gets the tokens it gets alone."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from jax.errors import JaxRuntimeError
from loading import load
from test_oengine import ThirdOfTokens, no_patience  # noqa: F401 - a fixture
from test_scheduler import EOS, build_scheduler, build_sequence

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_manager import HBMPageManager
from engine.devices.device_errors import DeviceError
from engine.devices.mesh import one_device
from engine.models.model_config import read_model_config
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.sampler import NO_TOKEN
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation
from engine.step.backend_choice import choose_backend, xla_backend
from engine.step.compilation import num_compilations
from engine.step.execution_manager import ExecutionManager
from engine.step.failures import Failures
from engine.step.forward_programs import FORWARD
from engine.step.runner import eSurgeRunner
from engine.step.step_shapes import StepShapes

MAX_NUM_SEQS, BUDGET, MAX_MODEL_LEN, NUM_PAGES, VOCAB_SIZE = 4, 6, 64, 65, 144
POISON = 7
"""The token whose embedding is NaN."""
INJECTED = JaxRuntimeError("INTERNAL: a wire has come loose\nand much more")


class Unreadable:
    """Token ids that the device fails to bring back."""

    def is_ready(self):
        """They will never be."""
        return True

    def __array__(self, *_, **__):
        raise INJECTED


class FaultyManager(ExecutionManager):
    """Fails at the steps that ``faults`` has: before it has taken the cache, or with it."""

    faults: dict[int, str]

    def executable(self, name, size):
        """A step, or a fault in its place."""
        step = super().executable(name, size)

        def faulty(*arguments):
            fault = self.faults.pop(0, None)
            self.faults = {number - 1: kind for number, kind in self.faults.items()}
            if fault == "refused":
                raise INJECTED
            results = step(*arguments)
            if fault == "taken":
                raise INJECTED
            self.unreadable = fault == "unreadable"
            return results

        return faulty if name == FORWARD else step


class FaultyRunner(eSurgeRunner):
    """Knows who was in the steps that failed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.failed = []

    def dispatch(self, plan):
        """As it is, but perhaps not to be read."""
        self._manager.unreadable = False
        step = super().dispatch(plan)
        if not self._manager.unreadable:
            return step
        return replace(step, executed=replace(step.executed, token_ids=Unreadable()))

    def collect(self, step):
        """Notes those in a step that has failed."""
        try:
            return super().collect(step)
        except DeviceError:
            self.failed = [sequence.request_id for sequence in step.plan.sequences]
            raise


@pytest.fixture(
    scope="module", params=[pytest.param(4, id="XLA"), pytest.param(16, id="kernels", marks=pytest.mark.thorough)]
)
def compiled(request, tmp_path_factory):
    """Compiled steps over pages of 4, which are XLA's, or of 16, the CPU kernels' where there are any."""
    directory = build_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)
    tensors = random_tensors(VARIANTS["qwen3"].config | {"num_hidden_layers": 1}, VARIANTS["qwen3"].seed)
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    write_tensors(directory, tensors)
    model = read_model_config(directory)
    metadata = PagedAttentionCacheMetaData(
        num_layers=model.num_layers, num_pages=NUM_PAGES, page_size=request.param, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, dtype=np.dtype(np.float32),
    )  # fmt: skip
    float32 = np.dtype(np.float32)
    head_dim = model.head_dim
    backend = xla_backend(float32) if request.param == 4 else choose_backend(request.param, head_dim, float32)
    decoder = load(directory, backend.weight_format(float32))
    # Two rows are as few as the sampler for few of them has.
    shapes = StepShapes(MAX_NUM_SEQS, BUDGET, MAX_MODEL_LEN, metadata, smallest_step=2)
    manager = FaultyManager(decoder, shapes, backend, one_device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.step.step_shapes.FEW", 2)
        manager.compile(lambda progress: None)
        yield manager


def build_engine(compiled, faults=None, *, num_pages=NUM_PAGES, run_ahead=1):
    """An engine that meets these faults, by the number of the step."""
    manager, shapes = compiled, compiled.shapes
    manager.faults = dict(faults or {})
    pages = HBMPageManager(num_pages)
    scheduler = InferenceScheduler(
        SequenceMemory(pages, shapes.groups), max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET
    )
    runner = FaultyRunner(manager, 0)
    return oEngine(scheduler, runner, ServingLimits(MAX_MODEL_LEN, VOCAB_SIZE, ()), run_ahead=run_ahead)


def build_sequences(delays=MappingProxyType({"held": 2, "held and counted": 1})):
    """More than there are slots; some keep penalties and biases on the device, and to some masks come late."""
    settings = {
        "held": {},
        "greedy": {"temperature": 0},
        "held and counted": {"temperature": 0, "frequency_penalty": 1},
        "counted": {"temperature": 0, "presence_penalty": 2, "repetition_penalty": 1.5},
        "biased": {"temperature": 0.7, "logit_bias": {5: 3.0}, "top_k": 20},
        "told": {"temperature": 0, "logprobs": 2},
    }
    return [
        Sequence(
            name, list(range(10, 13 + 3 * number)), SamplingParams(**params), frozenset(), 12, seed=number,
            constraint=ThirdOfTokens(delays[name], VOCAB_SIZE, never=POISON) if name in delays else None,
        )
        for number, (name, params) in enumerate(settings.items())
    ]  # fmt: skip


def run(engine, sequences):
    """Serve these to the end: tokens, and errors, by request."""
    tokens, errors = {}, {}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                assert output.internal and output.finish_reason == "error"
                errors[output.request_id] = output.error
        engine.check_integrity()
    return tokens, errors


def tokens_and_logprobs(engine, sequences):
    """What each gets, served together, and all log-probabilities of those who want some."""
    given, logprobs = {sequence.request_id: [] for sequence in sequences}, []
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            given[output.request_id] += output.token_ids
            for one in output.logprobs:
                given[output.request_id] += one.token_ids + one.ranks
                logprobs += one.logprobs
        engine.check_integrity()
    assert all(len(tokens) == 12 * (7 if name == "told" else 1) for name, tokens in given.items())
    return given, logprobs


@pytest.fixture(scope="module")
def alone(compiled):
    """The tokens that each gets when nothing fails and nobody else is there."""
    return {
        sequence.request_id: run(build_engine(compiled), [sequence])[0][sequence.request_id]
        for sequence in build_sequences()
    }


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("fault", ["refused", "taken", "unreadable"])
def test_a_step_that_fails_fails_only_who_was_in_it(compiled, alone, fault, run_ahead):
    """Wherever it fails, everybody else, in flight or running or waiting, gets what it gets alone; nothing compiles."""
    recomputed = 0
    for number in (0, 3, 9, 10):
        engine = build_engine(compiled, {number: fault}, run_ahead=run_ahead)
        before = num_compilations()

        tokens, errors = run(engine, build_sequences())

        assert set(errors) == set(engine._runner.failed)
        assert "INTERNAL: a wire has come loose), and this request was in it" in next(iter(errors.values()))
        for name, expected in alone.items():
            got = tokens.get(name, [])
            assert got == (expected[: len(got)] if name in errors else expected)
        stats = engine.stats()
        assert (stats.failed_steps, stats.failed_rows, stats.pages_owned) == (1, 0, 0)
        assert num_compilations() == before
        recomputed += stats.preemptions
    assert recomputed > 0 or run_ahead == 0


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_rows_that_sample_late_get_what_they_get_in_the_step(compiled, run_ahead):
    """Masks that are there in time, late and very late, for few rows and for all, beside every parameter: tokens and
    log-probabilities are those of steps that know all masks, and no logits stay behind."""
    names = [sequence.request_id for sequence in build_sequences()]
    for constrained in (names[:1], [name for name in names if name not in ("greedy", "counted")], names):
        in_time = build_engine(compiled, run_ahead=0)
        expected = tokens_and_logprobs(in_time, build_sequences(dict.fromkeys(constrained, 0)))
        for delays in ((0,), (0, 1, 7)):
            late = {name: delays[number % len(delays)] for number, name in enumerate(constrained)}
            engine = build_engine(compiled, run_ahead=run_ahead)

            tokens, logprobs = tokens_and_logprobs(engine, build_sequences(late))

            assert tokens == expected[0]
            np.testing.assert_allclose(logprobs, expected[1], atol=1e-4)
            assert engine._runner._io._kept == engine._runner._executor._logits == {}


def test_an_engine_gives_up_when_one_step_after_the_other_fails(compiled):
    """Three in a row with nothing landed between: it raises, and says what the device said."""
    engine = build_engine(compiled, dict.fromkeys(range(99), "taken"), run_ahead=0)

    with pytest.raises(
        DeviceError, match=r"3 steps in a row failed, the last one by: INTERNAL: a wire has come loose$"
    ):
        run(engine, [Sequence(str(n), [3] * 30, SamplingParams(), frozenset(), 5, seed=0) for n in range(9)])


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind(compiled, alone, run_ahead):
    """A prompt that makes NaN ends with an error of its own. Its neighbours, and those who get its pages next, in which
    there is NaN wherever they have not written yet, get what they get alone."""
    page_size = compiled.shapes.cache.page_size
    engine = build_engine(compiled, num_pages=1 + 128 // page_size, run_ahead=run_ahead)
    poisonous = [
        Sequence(f"poisonous {number}", [20] * 40 + [POISON] * 15, SamplingParams(), frozenset(), 5, seed=0)
        for number in range(4)
    ]

    tokens, errors = run(engine, [*poisonous[:2], *build_sequences(), *poisonous[2:]])
    again, _ = run(engine, build_sequences())

    assert set(errors) == {sequence.request_id for sequence in poisonous}
    assert all("NaN or infinity" in error for error in errors.values())
    assert {name: tokens[name] for name in alone} == alone == again
    assert (engine.stats().failed_steps, engine.stats().failed_rows) == (0, 4)


def test_tokens_before_nan_count():
    """With drafts a step gives several tokens. One that ends the text ends it, whatever the logits behind it; others are told
    before the error."""
    scheduler, pages = build_scheduler(speculation=Speculation(2))
    failures = Failures(scheduler, 1)
    sequences = [build_sequence(name, prompt=4, max_tokens=9) for name in ("ends", "goes on", "fails", "is well")]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.update(scheduler.plan(), StepResult([[7]] * 4, drafts=[2] * 4))
    plan = scheduler.plan()
    assert plan.samples == [2] * 4

    rows = [[EOS, NO_TOKEN], [8, NO_TOKEN], [NO_TOKEN], [8, 8]]
    result = StepResult(rows, drafts=[0] * 4)
    outputs = failures.end_rows(plan, result, lambda: scheduler.update(plan, result))

    told = [(output.request_id, output.token_ids, output.finish_reason) for output in outputs]
    assert told == [
        ("ends", [EOS], "stop"), ("goes on", [8], None), ("is well", [8, 8], None),
        ("fails", [], "error"), ("goes on", [], "error"),
    ]  # fmt: skip
    assert (failures.num_rows, scheduler.num_running) == (2, 1)
    scheduler.check_integrity()
    assert pages.num_cached == 0
