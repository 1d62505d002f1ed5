"""Models of random layers through the whole engine: whatever the sizes, each request gets what it gets alone.

Pages, prefixes, states, windows, the host's memory, preemption and steps ahead meet here in ways that
no published model has.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from poisoned_engines import CopyingRunner, GreedyManager, engine_over, tokens_of, turns
from random_models import FLOAT32, RandomModel, states_of, words

from caching.metadata import pages_for
from caching.page_manager import HBMPageManager
from engine.devices.mesh import one_device
from engine.models.decoder import Decoder
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.sampling_params import SamplingParams
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.compilation import num_compilations
from engine.step.host_cache.host_budget import STATE_COPY_SIZES, STATES_STAGED, HostBudget
from engine.step.sampling_programs import LOGPROBS
from engine.step.step_shapes import StepShapes

TIE = 2e-4
"""Two log-probabilities that are closer may change places with the rounding of a step of other rows."""
MOST_KEPT = 5


class Manager(GreedyManager):
    """Log-probabilities, too, by which a tie is known."""

    def programs(self, layout: Any) -> Any:
        found = super().programs(layout)
        return found + [one for one in self.sampling.of(layout) if one.name == LOGPROBS]


@dataclass
class Case:
    """A random model compiled for random sizes."""

    model: ModelSpec
    manager: Manager
    random: Random
    max_num_seqs: int

    def engine(self, num_pages: int, kept: int, *, host: bool, run_ahead: int) -> Any:
        """An engine whose free memory is NaN."""
        shapes, states, slots = self.manager.shapes, None, None
        budget = shapes.host if host else None
        pages = HBMPageManager(num_pages, budget and budget.tier())
        if shapes.cache.states is not None:
            of_states = budget.states.tier() if budget is not None and budget.states is not None else None
            slots = HBMPageManager(1 + self.max_num_seqs + kept, of_states)
            states = SequenceStates(slots, shapes.cache.page_size, self.max_num_seqs)
        cost = CopyCost(0.0, shapes.max_num_batched_tokens) if host else None
        memory = SequenceMemory(pages, shapes.groups, states, cost)
        engine = engine_over(self.manager, pages, memory, CopyingRunner, run_ahead=run_ahead, slots=slots)
        engine._runner.waits = self.random.random() < 0.5  # type: ignore[attr-defined]
        return engine

    def alone(self, engine: Any, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Its tokens in an idle engine, and by how much each was likelier than the next best."""
        params = SamplingParams(temperature=0, logprobs=2)
        prompt, most = sequence.prompt_token_ids, sequence.max_tokens
        engine.add(Sequence("alone", prompt, params, frozenset(), most, seed=0, salt=None))
        tokens, margins = [], []
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                tokens += output.token_ids
                margins += [one.logprobs[-2] - one.logprobs[-1] for one in output.logprobs]
        return tokens, margins


def build_case(seed: int) -> Case:
    """The case of a seed."""
    random = Random(seed)
    model = RandomModel(random).spec()
    scans = random.random() < 0.3
    backend = replace(xla_backend(FLOAT32, latents=model.has_latents), scans=scans)
    partition = Partition(model)
    decoder = Decoder(partition, nnx.Rngs(seed), scans=scans)
    page_size, chunk, max_num_seqs = random.randint(1, 9), random.randint(3, 13), random.randint(1, 4)
    chunk = max(chunk, max_num_seqs)
    max_model_len = random.randint(70, 90)
    one = backend.one_page(partition, page_size, FLOAT32)
    states = one.states and replace(one.states, num_slots=1 + max_num_seqs + MOST_KEPT)
    num_pages = 1 + len(one.windows) * (max_num_seqs + 1) * pages_for(max_model_len, page_size)
    pool = replace(one, num_pages=num_pages, states=states)
    of_states = HostBudget(random.randint(1, 20), STATES_STAGED, 1, STATE_COPY_SIZES) if states_of(model) else None
    staged = len(one.windows) * pages_for(random.randint(1, 4) * chunk, page_size)
    host = HostBudget(random.randint(20, 300), staged, 1, random.choice(((4, 16), (1, 3))), states=of_states)
    shapes = StepShapes(max_num_seqs, chunk, max_model_len, pool, smallest_step=chunk, host=host)
    manager = Manager(decoder, shapes, backend, one_device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.step.inputs.layout.LEAST_LOGITS", random.choice((0, 8)))
        manager.compile(lambda progress: None)
    return Case(model, manager, random, max_num_seqs)


def check(seed: int) -> tuple[int, int]:
    """Run a seed's model; how many tokens were compared, and how many not, behind a tie."""
    case = build_case(seed)
    random, shapes = case.random, case.manager.shapes
    asked = list(turns(np.random.default_rng(seed), talks=random.randint(2, 5), rounds=random.randint(1, 3)))
    asked = [make for make in asked if len(make().prompt_token_ids) + make().max_tokens <= shapes.max_model_len]
    idle = case.engine(shapes.cache.num_pages, MOST_KEPT, host=False, run_ahead=0)
    each = {make().request_id: case.alone(idle, make()) for make in asked}
    groups, before = len(shapes.cache.windows), num_compilations()
    least = groups * pages_for(shapes.max_model_len, shapes.cache.page_size)
    compared = ties = 0
    for host in (False, True):
        num_pages = 1 + random.randint(least, shapes.cache.num_pages - 1)
        kept, run_ahead = random.randint(0, MOST_KEPT), random.randint(0, 3)
        what = f"seed {seed}: {words(case.model)}; page_size {shapes.cache.page_size}, steps of {shapes.max_num_batched_tokens} "
        what += (
            f"tokens, {case.max_num_seqs} rows, {num_pages} pages, {kept} states, host {host}, run_ahead {run_ahead}"
        )
        engine = case.engine(num_pages, kept, host=host, run_ahead=run_ahead)
        for _ in range(2):
            given = tokens_of(engine, [make() for make in asked])
            for name, tokens in given.items():
                expected, margins = each[name]
                same = next((at for at, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
                assert same == len(tokens) or margins[same] < TIE, f"{what}: {name} differs from token {same} on"
                compared, ties = compared + same, ties + len(tokens) - same
            engine.sleep()
            engine.wake()
    assert num_compilations() == before, what
    return compared, ties


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_requests_of_a_random_model_get_what_they_get_alone(seed: int) -> None:
    """With shared prefixes, few pages and states, a tier on the host or none, steps ahead, and after a sleep."""
    compared, ties = check(seed)
    jax.clear_caches()

    assert compared > 20 * ties
