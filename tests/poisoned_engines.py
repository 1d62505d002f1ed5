"""Engines whose memory is NaN wherever it holds nothing, for tests of what is read: greedy, with programs for no more."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from caching.page_manager import SINK_PAGE, HBMPageManager
from engine.devices.device_errors import DeviceError, device_errors
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.sampling.needs import Need
from engine.sampling_params import SamplingParams
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.step.execution_manager import ExecutionManager
from engine.step.forward_programs import FORWARD, WRITE_SLOTS
from engine.step.pending_step import PendingStep
from engine.step.runner import eSurgeRunner

VOCABULARY = 144


class GreedyManager(ExecutionManager):
    """Compiles only what greedy requests run."""

    def programs(self, layout):
        copies = [name for copied in self.copied for name in (copied.gather, copied.scatter)]
        kept = FORWARD, WRITE_SLOTS, self.sampling.sampler(Need(0)), *copies
        return [p for p in super().programs(layout) if p.name in kept]


class PoisonedRunner(eSurgeRunner):
    """Before each step, pages and state slots that nobody owns and nobody can find are NaN, and so are the sinks: who reads one
    gives NaN too. A state that the step itself begins with is there, though its slot may be another's after it."""

    pages: HBMPageManager
    slots: HBMPageManager | None = None

    def dispatch(self, plan):
        """Poison, then dispatch."""
        shapes, cache = self._manager.shapes.cache, self._executor._cache
        cache = replace(cache, layers=poisoned(cache.layers, self.pages, shapes.num_pages))
        if self.slots is not None:
            cache = replace(
                cache, states=poisoned(cache.states, self.slots, shapes.states.num_slots, plan.state_sources)
            )
        self._executor._cache = cache
        return super().dispatch(plan)


class CopyingRunner(PoisonedRunner):
    """Copies before it poisons. If it ``waits``, copies have arrived by the next plan, so that
    every run is the same."""

    waits = True

    def dispatch(self, plan):
        """Copy, poison, then dispatch."""
        copies, plan.copies = plan.copies, []
        try:
            with device_errors():
                for each in copies:
                    self._copy(each)
        except DeviceError as error:
            return PendingStep(plan, failure=error)
        if self.waits and self.host is not None:
            ways = [way for kind in self.host.kinds for way in (kind.storing, kind.fetching)]
            jax.block_until_ready([contents for way in ways for contents, _ in way._lists])
        return super().dispatch(plan)


def poisoned(arrays, owners, count, read=()):
    """Arrays of so many pages or slots, or of several layers' one after the other; but for those that are ``read``."""
    free = np.zeros(count, bool)
    free[owners._free] = True
    free[list(read)] = False
    free[SINK_PAGE] = True
    return _poisoned(arrays, np.tile(free, jax.tree.leaves(arrays)[0].shape[0] // count))


@jax.jit
def _poisoned(arrays, free):
    def of_one(array):
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        poison = jnp.nan if is_float else jnp.iinfo(array.dtype).max  # the bits of a small float's NaN
        return jnp.where(free.reshape(-1, *[1] * (array.ndim - 1)), jnp.array(poison, array.dtype), array)

    return jax.tree.map(of_one, arrays)


def engine_over(manager, pages, memory, runner=PoisonedRunner, *, run_ahead=1, slots=None):
    """An engine over pages of its own, and slots of states if there are such."""
    shapes = manager.shapes
    scheduler = InferenceScheduler(
        memory,
        max_num_seqs=shapes.max_num_seqs,
        max_num_batched_tokens=shapes.max_num_batched_tokens,
        reserve=GrowthReserve(pages.num_total, watermark=0.0, least=0.0),
    )
    poisoning = runner(manager, 0)
    poisoning.pages, poisoning.slots = pages, slots
    limits = ServingLimits(shapes.max_model_len, VOCABULARY, ())
    return oEngine(scheduler, poisoning, limits, run_ahead=run_ahead)


def tokens_of(engine, sequences):
    """What each sequence is given; none fails."""
    tokens, failed = tokens_and_failed(engine, sequences)
    assert not failed, failed
    return tokens


def tokens_and_failed(engine, sequences, lost=None):
    """What each sequence is given, and the ids of those that a failed step ended; that leaves the count ``lost``, if any, at 0."""
    tokens, failed = {}, set()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        before = engine.stats().failed_steps
        for output in engine.step():
            if output.error is not None:
                failed.add(output.request_id)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        assert lost is None or engine.stats().failed_steps == before or getattr(engine.stats(), lost) == 0
        engine.check_integrity()
    assert engine.stats().pages_owned == 0 and (
        engine._scheduler.memory.slots is None or engine._scheduler.memory.slots.num_owned == 0
    )
    return tokens, failed


def ask(number, prompt, count=8, salt=b""):
    """A greedy sequence."""
    return Sequence(str(number), prompt, SamplingParams(temperature=0), frozenset(), count, seed=0, salt=salt)


def turns(random, talks, rounds):
    """Prompts of conversations that take turns: each time all that was said before, and a bit more."""
    said = [random.integers(1, 140, random.integers(8, 20)).tolist() for _ in range(talks)]
    for turn in range(rounds):
        for talk in range(talks):
            said[talk] = said[talk] + random.integers(1, 140, random.integers(4, 9)).tolist()
            yield partial(ask, f"{talk}.{turn}", said[talk], int(random.integers(3, 9)))
