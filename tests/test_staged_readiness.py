"""Staged readiness: serve when few buckets are compiled, the others follow, and nothing else ever compiles."""

import queue
import threading

import jax
import pytest
from checkpoints import build_checkpoint
from fakes import FakeEngine
from test_driver import build_driver, error_of, submit

from engine.build import build_engine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.compilation import StagedCompilation, counted_apart, num_compilations

PATIENCE = 120
BUCKETS = [1, 2, 3, 4, 6, 8, 12, 16]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model whose context is 64 tokens."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1, head_dim=16)


def build_staged(directory, *, staged=True):
    """An engine of eight buckets, of which the last and one an eighth of it cover all."""
    config = EngineConfig(
        model=directory, max_num_seqs=4, max_num_batched_tokens=16, page_size=16, staged_readiness=staged
    )
    return build_engine(config, lambda progress: None)


def completions(engine, prefix):
    """The tokens of prompts of many lengths, greedy and drawn, that run together."""
    tokens = {}
    for number in range(9):
        params = SamplingParams(temperature=number % 2)
        engine.add(Sequence(f"{prefix} {number}", [5 + number] * (1 + 3 * number), params, frozenset(), 6, seed=number))
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id.removeprefix(prefix), []).extend(output.token_ids)
    return tokens


def adopt_all(engine):
    """Start the workers and put to use what they compile, until there is no more."""
    bell = queue.SimpleQueue()
    engine.compile_staged(lambda: bell.put(None))
    while engine.stats().staged_compilations_left:
        bell.get(timeout=PATIENCE)
        engine.adopt()


def test_an_engine_serves_before_and_after_the_others_are_compiled(directory):
    """The same tokens come either way, and compilations_after_ready stays 0: what was planned is counted apart."""
    engine = build_staged(directory)
    before, left = completions(engine, "before"), engine.stats().staged_compilations_left

    adopt_all(engine)

    assert completions(engine, "after") == before
    stats = engine.stats()
    assert (stats.staged_compilations, stats.staged_compilations_left) == (left, 0)
    assert left >= len(BUCKETS) - 2
    assert stats.compilations_after_ready == 0


def test_without_it_nothing_is_left_to_compile(directory):
    """An engine that is not staged is ready with all of its buckets."""
    assert build_staged(directory, staged=False).stats().staged_compilations_left == 0


def test_a_step_runs_in_the_smallest_bucket_that_is_compiled(directory):
    """First in a larger one; in its own as soon as it is adopted, not before."""
    engine = build_staged(directory)
    manager = engine._runner._manager
    sizes = [(manager.layout_for(tokens).tokens) for tokens in (1, 2, 3, 9)]

    adopt_all(engine)

    assert sizes == [2, 2, 16, 16]
    own = [next(bucket for bucket in manager.shapes.buckets if bucket >= tokens) for tokens in range(1, 11)]
    assert [manager.layout_for(tokens).tokens for tokens in range(1, 11)] == own


def test_what_goes_wrong_in_the_background_is_raised_where_it_is_adopted():
    """No failed compilation is passed over: the thread that steps the engine gets its exception."""

    def job():
        raise RuntimeError("the compiler is on fire")

    ended = threading.Event()
    staged = StagedCompilation([job], publish=lambda: None)
    staged.begin(ended.set)
    assert ended.wait(PATIENCE)

    with pytest.raises(RuntimeError, match="the compiler is on fire"):
        staged.adopt()


def test_closing_leaves_the_jobs_that_have_not_begun():
    """What is under way ends by itself; nothing else is begun, and nobody waits."""
    reached, let_go, begun = threading.Event(), threading.Event(), []

    def held():
        reached.set()
        assert let_go.wait(PATIENCE)

    jobs = [held] * 100 + [lambda: begun.append(1)]
    staged = StagedCompilation(jobs, publish=lambda: None)
    staged.begin(lambda: None)
    assert reached.wait(PATIENCE)

    staged.close()
    let_go.set()
    staged._pool.shutdown(wait=True)

    assert not begun


class StagedEngine(FakeEngine):
    """A parrot that has one thing left to compile, by ``job``."""

    def __init__(self, job):
        super().__init__()
        self.staged = StagedCompilation([job], publish=lambda: None)
        self.ended = threading.Event()
        """The job has ended, and the driver was told."""
        self.adopted = threading.Event()

    def compile_staged(self, notify):
        self.staged.begin(lambda: (notify(), self.ended.set()))

    def adopt(self):
        self.staged.adopt()
        self.adopted.set()

    def close(self):
        self.staged.close()


def test_a_driver_adopts_while_it_is_idle():
    """The execution thread is woken for it, with no request to come by."""
    engine = StagedEngine(lambda: None)

    with build_driver(engine):
        assert engine.adopted.wait(PATIENCE)


def test_a_failed_compilation_ends_the_driver_loudly(caplog):
    """Open requests hear why, and so does the daemon, which will be restarted."""
    go = threading.Event()

    def job():
        assert go.wait(PATIENCE)
        raise RuntimeError("the compiler is on fire")

    failed = queue.SimpleQueue()
    engine = StagedEngine(job)
    engine._gate = threading.Semaphore(1)
    with build_driver(engine, on_failure=failed.put) as driver:
        channel = submit(driver, params={})
        go.set()
        assert engine.ended.wait(PATIENCE)  # else 100 steps may be over before
        engine._gate.release(100)

        assert "the compiler is on fire" in failed.get(timeout=PATIENCE)
        assert error_of(channel)[0] == "internal"
    assert "the compiler is on fire" in caplog.text


def test_a_driver_stops_while_something_compiles():
    """Nobody waits for a compiler; open requests are told."""
    let_go = threading.Event()
    engine = StagedEngine(lambda: let_go.wait(PATIENCE) and None)
    engine._gate = threading.Semaphore(1)
    with build_driver(engine) as driver:
        channel = submit(driver, params={})
        stopper = threading.Thread(target=driver.stop, args=["enough"])
        stopper.start()
        engine._gate.release(100)
        stopper.join(PATIENCE)

        assert not stopper.is_alive() and error_of(channel) == ("stopped", "enough")
    let_go.set()


def test_only_what_is_planned_is_counted_apart():
    """A compilation by another thread meanwhile, or afterwards by the same, counts as one too many."""
    before = num_compilations()

    with counted_apart():
        jax.jit(lambda x: x * 2 + before)(1.0)
        planned = num_compilations()
        other = threading.Thread(target=lambda: jax.jit(lambda x: x * 5 + before)(1.0))
        other.start()
        other.join()
    unplanned = num_compilations()
    jax.jit(lambda x: x * 7 + before)(1.0)

    assert planned == before < unplanned < num_compilations()


def test_what_is_counted_apart_within_another_stays_so_until_the_outer_ends():
    """A daemon that wakes counts what it writes apart, and so may the write."""
    before = num_compilations()

    with counted_apart():
        with counted_apart():
            jax.jit(lambda x: x * 11 + before)(1.0)
        jax.jit(lambda x: x * 13 + before)(1.0)
        planned = num_compilations()
    jax.jit(lambda x: x * 17 + before)(1.0)

    assert planned == before < num_compilations()
