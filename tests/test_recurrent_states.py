"""Recurrent states on the device: the same tokens whoever shares what, and no memory beyond what they need."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from decaying_mixer import model_of_sums
from flax import nnx
from poisoned_engines import GreedyManager, PoisonedRunner, engine_over, tokens_and_failed

from caching.page_manager import HBMPageManager
from engine.config import EngineConfig
from engine.devices.device_errors import DeviceError
from engine.devices.mesh import one_device
from engine.errors import ConfigurationError
from engine.memory.page_budget import CachePlanner
from engine.models.decoder import Decoder
from engine.models.layers.cache_layout import cache_layout
from engine.models.layers.mixer import State
from engine.models.partition import Partition
from engine.sampling.operations import XLA_SAMPLING
from engine.sampling_params import SamplingParams
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
PAGE_SIZE, STEP, MAX_NUM_SEQS, MAX_MODEL_LEN, MOST_KEPT = 4, 8, 3, 96, 6


class FailingRunner(PoisonedRunner):
    """Loses steps."""

    failing = 0
    """Steps until one fails."""

    def collect(self, step):
        """Every so many steps, one is lost with all that is on the device."""
        if self.failing:
            self.failing -= 1
            if not self.failing:
                raise DeviceError("lost")
        return super().collect(step)


@pytest.fixture(scope="module")
def blocks_of_model(tmp_path_factory):
    """``model_of_sums``, whose first attention may have a window."""
    return partial(model_of_sums, tmp_path_factory.mktemp("gemma"))


def compiled(model, *, scans=False):
    """The greedy programs of a model of random weights."""
    backend = replace(xla_backend(FLOAT32), scans=scans)
    partition = Partition(model)
    decoder = Decoder(partition, nnx.Rngs(0), scans=scans)
    one = backend.one_page(partition, PAGE_SIZE, FLOAT32)
    pool = replace(one, num_pages=161, states=replace(one.states, num_slots=1 + MAX_NUM_SEQS + MOST_KEPT))
    shapes = StepShapes(MAX_NUM_SEQS, STEP, MAX_MODEL_LEN, pool, smallest_step=STEP)
    manager = GreedyManager(decoder, shapes, backend, one_device())
    manager.compile(lambda progress: None)
    return manager


def build_engine(manager, num_pages=None, run_ahead=1, kept=MOST_KEPT):
    """An engine over pages and slots of its own, which are poisoned while they are free."""
    shapes = manager.shapes
    pages, slots = HBMPageManager(num_pages or shapes.cache.num_pages), HBMPageManager(1 + MAX_NUM_SEQS + kept)
    memory = SequenceMemory(pages, shapes.groups, SequenceStates(slots, PAGE_SIZE, MAX_NUM_SEQS))
    return engine_over(manager, pages, memory, FailingRunner, run_ahead=run_ahead, slots=slots)


def conversations(random, count):
    """Prompts that begin alike, some of them twice."""
    system = random.integers(1, 140, 24).tolist()
    prompt = []
    for number in range(count):
        if number % 3 != 2:
            prompt = system[: random.integers(4, 25)] + random.integers(1, 140, random.integers(1, 30)).tolist()
        greedy = SamplingParams(temperature=0)
        yield partial(Sequence, str(number), prompt, greedy, frozenset(), int(random.integers(8, 24)), seed=0)


def alone(manager, asked):
    """Their tokens when each runs alone, without a step ahead and without shared prefixes."""
    each = [tokens_and_failed(build_engine(manager, run_ahead=0), [build(salt=None)])[0] for build in asked]
    return {request_id: tokens for one in each for request_id, tokens in one.items()}


@pytest.fixture(scope="module")
def plain(blocks_of_model):
    """The greedy programs of the model with windows, layer by layer."""
    return compiled(blocks_of_model(windows=True))


@pytest.fixture(scope="module")
def asked():
    """Six requests."""
    return list(conversations(np.random.default_rng(5), 6))


@pytest.fixture(scope="module")
def expected(plain, asked):
    """Their tokens when each runs alone, without a step ahead and without shared prefixes."""
    return alone(plain, asked)


@pytest.mark.parametrize("run_ahead", [0, 3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kept", [0, 6, pytest.param(2, marks=pytest.mark.thorough)])
def test_tokens_are_those_of_each_request_alone(plain, asked, expected, run_ahead, kept):
    """With prefix hits, more sequences than slots, and pages so few that some are preempted."""
    engine = build_engine(plain, num_pages=27, run_ahead=run_ahead, kept=kept)

    first, _ = tokens_and_failed(engine, [build() for build in asked])
    again, _ = tokens_and_failed(engine, [build() for build in asked])

    assert len({tuple(tokens) for tokens in expected.values()}) > 3
    assert first == again == expected
    stats = engine.stats()
    assert stats.preemptions and (stats.prefix_cache_hits or not kept)


def test_a_next_turn_gives_what_it_gives_alone(plain, asked):
    """It begins from the state behind its first turn."""
    engine = build_engine(plain, run_ahead=2)
    before, _ = tokens_and_failed(engine, [asked[0]()])
    first = asked[0]()
    prompt = [*first.prompt_token_ids, *before["0"], 5, 6, 7]
    turn = partial(Sequence, "turn", prompt, first.params, frozenset(), 12, seed=0)

    expected, hits = alone(plain, [turn]), engine.stats().prefix_cache_hits
    told, _ = tokens_and_failed(engine, [turn()])

    known = len(first.prompt_token_ids) + len(before["0"]) - 1
    assert told == expected
    assert engine.stats().prefix_cache_hits - hits == known // PAGE_SIZE * PAGE_SIZE


def test_a_failed_step_leaves_no_stale_state(plain, asked, expected):
    """All that was kept is gone; who was not in the step gets the same tokens as ever."""
    engine = build_engine(plain, run_ahead=2)
    for steps in (9, 23, 31):
        engine._runner.failing = steps

        told, failed = tokens_and_failed(engine, [build() for build in asked])

        assert failed and failed != set(expected)
        assert all(tokens == expected[request_id] for request_id, tokens in told.items() if request_id not in failed)
    assert tokens_and_failed(engine, [build() for build in asked])[0] == expected


def test_sleep_forgets_states(plain, asked, expected):
    """They are computed again."""
    engine = build_engine(plain)
    tokens_and_failed(engine, [build() for build in asked])
    assert engine.stats().recurrent_states_cached

    engine.sleep()
    assert not engine.stats().recurrent_states_cached
    engine.wake()

    assert tokens_and_failed(engine, [build() for build in asked])[0] == expected


@pytest.mark.thorough
def test_layers_in_a_scan_have_their_slots_in_one_array(blocks_of_model, asked):
    """Those of each layer lie behind those of the one before."""
    manager = compiled(blocks_of_model(windows=False), scans=True)
    engine = build_engine(manager, num_pages=27)

    [(sums, counts)] = engine._runner._executor._cache.states
    assert sums.shape[0] == counts.shape[0] == 2 * manager.shapes.cache.states.num_slots
    assert tokens_and_failed(engine, [build() for build in asked])[0] == alone(manager, asked)


def test_states_have_places_of_their_own(blocks_of_model):
    """They take no part in pages, whose layers are those of attention alone."""
    layout = cache_layout(blocks_of_model(windows=True).blocks)

    assert layout.num_layers == 1 and layout.windows == (None, 8) and len(layout.states) == 2
    assert [layout.array(place, stacked=False) for (place,) in layout.places] == [1, 0, 2, 0]
    assert [layout.array(place, stacked=True) for (place,) in layout.places] == [1, 0, 1, 0]


def test_a_layer_of_two_mixers_has_pages_and_a_state(blocks_of_model):
    """Each has its place, by the order of the layer's mixers, and another's layer reads the pages alone."""
    state, full, *_ = blocks_of_model(windows=False).blocks
    both = replace(full, beside=state.mixer)
    turned = replace(state, beside=full.mixer)
    reader = replace(full, mixer=replace(full.mixer, kv_source=1))

    layout = cache_layout((both, turned, reader))

    assert layout.num_layers == len(layout.states) == 2 and layout.windows == (None,)
    places = [[layout.array(place, stacked=False) for place in each] for each in layout.places]
    assert places == [[0, 2], [3, 1], [1]] and layout.in_pages(1) == layout.places[2][0]


def test_two_mixers_of_one_kind_in_a_layer_are_refused(blocks_of_model):
    """Nothing would say which of a layer's pages another one reads."""
    model = blocks_of_model(windows=False)
    full = next(block for block in model.blocks if not isinstance(block.mixer.cached, State))

    with pytest.raises(ValueError, match="one must have pages and the other a state"):
        replace(model, blocks=(replace(full, beside=full.mixer),))


def planner_of(model, left, **settings):
    """A planner that has so many bytes left beside weights and scratch."""
    config = EngineConfig(max_num_seqs=4, max_model_len=64, page_size=PAGE_SIZE, **settings)
    one = xla_backend(FLOAT32).one_page(Partition(model), PAGE_SIZE, FLOAT32)
    beside = CachePlanner(config, Partition(model), one, 0, 0, XLA_SAMPLING).reserved
    return CachePlanner(config, Partition(model), one, 0, beside + left, XLA_SAMPLING), one


@pytest.mark.parametrize(("conversations", "kept"), [(1, 0), (2, 2), (7, 7), (30, 12)])
def test_there_is_a_kept_state_to_the_pages_of_each_conversation(blocks_of_model, conversations, kept):
    """States of running sequences and pages of one at full length come first, and no page that fits is left out."""
    model = blocks_of_model(windows=False)
    planner, one = planner_of(model, 0)
    pages, slot = planner.groups.pages_of(64), one.states.bytes_per_slot
    left = conversations * (pages * one.bytes_per_page + slot)

    pool = planner_of(model, 5 * slot + left)[0].pool

    assert slot == 2 * 4 * (model.hidden_size + 1) and pool.states.num_slots == 5 + kept
    assert pool.num_pages == min(4 * pages + 1, (left - kept * slot) // one.bytes_per_page)


@pytest.mark.parametrize(
    ("settings", "slots"), [({"enable_prefix_caching": False}, 5), ({"num_pages": 20}, 5 + 12)], ids=str
)
def test_slots_follow_from_the_settings(blocks_of_model, settings, slots):
    """Without prefix caching no state is kept; beside pages that were asked for, as many as fit."""
    planner, _ = planner_of(blocks_of_model(windows=False), 10**7, **settings)

    assert planner.pool.states.num_slots == slots


def test_too_little_memory_is_said_with_the_states_that_it_is_for(blocks_of_model):
    """Nothing is left for pages beside the states of running sequences."""
    with pytest.raises(ConfigurationError, match=r"5 states of [0-9,]+ .one for each of max_num_seqs 4 sequences"):
        _ = planner_of(blocks_of_model(windows=False), 2000)[0].pool


@pytest.mark.parametrize("salt", [None, b""])
def test_a_running_sequence_owns_one_slot_and_at_the_end_of_a_page_one_more(plain, salt):
    """All slots and pages are as large as was reckoned with, and what ends keeps none of its own."""
    engine, pool = build_engine(plain, run_ahead=0), plain.shapes.cache
    for number in range(MAX_NUM_SEQS):
        engine.add(Sequence(str(number), [number] * 9, SamplingParams(temperature=0), frozenset(), 30, 0, salt=salt))
    owned = []
    while engine.has_work:
        engine.step()
        owned.append(engine._scheduler.memory.slots.num_owned - engine.stats().running)

    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner._executor._cache)) == pool.num_bytes
    assert set(owned) == {0} if salt is None else set(owned) <= set(range(MAX_NUM_SEQS + 1))
    assert (engine.stats().recurrent_states_cached > 0) == (salt is not None)
