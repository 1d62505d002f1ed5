"""Recurrent states in the host's tier: with their pages they come back, and give the same tokens."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from decaying_mixer import model_of_sums
from flax import nnx
from poisoned_engines import CopyingRunner, GreedyManager, engine_over, tokens_and_failed, tokens_of, turns

from caching.host_tier import HostTier
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_manager import HBMPageManager
from caching.state.spec import StatePool
from engine.config import EngineConfig
from engine.devices.mesh import one_device
from engine.errors import ConfigurationError
from engine.models.decoder import Decoder
from engine.models.partition import Partition
from engine.sampling_params import SamplingParams
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.compilation import num_compilations
from engine.step.host_cache.host_budget import STATE_COPY_SIZES, HostBudget, host_budget
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
PAGE_SIZE, CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN, KEPT = 4, 8, 3, 80, 3
BUDGET = HostBudget(300, 12, 1, states=HostBudget(30, 4, 1, STATE_COPY_SIZES))


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """The greedy programs of a model with states, a window and all tokens, and those that copy."""
    partition = Partition(model_of_sums(tmp_path_factory.mktemp("model"), windows=True))
    backend = xla_backend(FLOAT32)
    one = backend.one_page(partition, PAGE_SIZE, FLOAT32)
    pool = replace(one, num_pages=161, states=replace(one.states, num_slots=1 + MAX_NUM_SEQS + KEPT))
    shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, pool, smallest_step=CHUNK, host=BUDGET)
    manager = GreedyManager(Decoder(partition, nnx.Rngs(0)), shapes, backend, one_device())
    manager.compile(lambda progress: None)
    return manager


def build_engine(manager, *, num_pages=161, kept=KEPT, host=BUDGET, run_ahead=1, waits=True):
    """An engine whose free memory is NaN, with a tier behind it or none."""
    pages = HBMPageManager(num_pages, host and host.tier())
    slots = HBMPageManager(1 + MAX_NUM_SEQS + kept, host and host.states.tier())
    states = SequenceStates(slots, PAGE_SIZE, MAX_NUM_SEQS)
    memory = SequenceMemory(pages, manager.shapes.groups, states, host and CopyCost(0.0, CHUNK))
    engine = engine_over(manager, pages, memory, CopyingRunner, run_ahead=run_ahead, slots=slots)
    engine._runner.waits = waits
    return engine


@pytest.fixture(scope="module")
def asked():
    """Conversations that take turns, of which neither the pages nor the states have room."""
    return list(turns(np.random.default_rng(0), talks=8, rounds=4))


@pytest.fixture(scope="module")
def alone(manager, asked):
    """Their tokens without a tier, and without shared prefixes."""
    return tokens_of(build_engine(manager, host=None), [make(salt=None) for make in asked])


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [KEPT, 1])
@pytest.mark.parametrize(("run_ahead", "waits"), [(1, True), (0, False), (2, False)])
def test_states_and_pages_come_back_and_give_the_same_tokens(manager, asked, alone, kept, run_ahead, waits):
    """With preemption, and with fewer tokens computed than without a tier."""
    without = build_engine(manager, num_pages=55, kept=kept, host=None, run_ahead=run_ahead)
    tokens_of(without, [make() for make in asked])
    engine = build_engine(manager, num_pages=55, kept=kept, run_ahead=run_ahead, waits=waits)
    before = num_compilations()

    tokens = tokens_of(engine, [make() for make in asked])

    stats = engine.stats()
    assert tokens == alone and num_compilations() == before
    assert stats.host_states_cached > KEPT and stats.host_states_total == 30
    if waits:
        assert engine._scheduler.memory.slots.tier.pages_loaded > 0 and stats.host_cache_hits > 0
        assert stats.prompt_tokens < without.stats().prompt_tokens


@pytest.mark.thorough
def test_a_state_on_the_host_survives_sleep(manager, asked, alone):
    """A prompt goes on from it after the device's memory was dropped."""
    engine = build_engine(manager, num_pages=55)
    tokens_of(engine, [make() for make in asked[:16]])
    loaded = engine._scheduler.memory.slots.tier.pages_loaded

    engine.sleep()
    engine.wake()
    again = tokens_of(engine, [make() for make in asked[:16]])

    assert all(alone[name] == tokens for name, tokens in again.items())
    assert engine._scheduler.memory.slots.tier.pages_loaded > loaded


@pytest.mark.thorough
def test_a_reset_forgets_the_states_on_the_host(manager, asked):
    """The weights may have changed."""
    engine = build_engine(manager, num_pages=55)
    tokens_of(engine, [make() for make in asked[:16]])
    loaded = engine._scheduler.memory.slots.tier.pages_loaded
    assert engine.stats().host_states_cached

    engine.reset_prefix_cache()

    assert not engine.stats().host_states_cached
    tokens_of(engine, [asked[0]()])
    assert engine._scheduler.memory.slots.tier.pages_loaded == loaded


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [0, 1], ids=["pages", "states"])
def test_a_failing_copy_loses_the_tier_and_nothing_else(manager, asked, alone, kind, monkeypatch):
    """Who is in the steps that then fail ends; all others get what they would, and no slot leaks."""
    engine = build_engine(manager, num_pages=55)
    slots = engine._runner.host.kinds[kind]
    copy, calls, kept = slots.copy, iter(range(10**6)), []

    def failing(cache, command):
        if command.fetches and next(calls) % 3 == 2:
            kept.append(engine.stats().host_states_cached)
            raise jax.errors.JaxRuntimeError("INTERNAL: a wire has come loose")
        return copy(cache, command)

    monkeypatch.setattr(slots, "copy", failing)
    tokens, failed = tokens_and_failed(engine, [make() for make in asked], lost="host_states_cached")

    assert kept and max(kept) > 0 and len(failed) < len(asked)
    assert engine._scheduler.memory.slots.num_owned == engine._scheduler.memory.pages.num_owned == 0
    assert all(tokens[name] == alone[name] for name in alone.keys() - failed)


def begun_from_host(kept):
    """A sequence of two known pages whose state the host has alone, and the states that it is of."""
    slots = HBMPageManager(1 + MAX_NUM_SEQS + kept, HostTier(4, staged=4))
    states = SequenceStates(slots, PAGE_SIZE, MAX_NUM_SEQS)
    sequence = Sequence("a", list(range(11)), SamplingParams(), frozenset(), 1, seed=0)
    key = sequence.page_keys_to(2, PAGE_SIZE)[-1]
    slots.tier.offer(1, key)
    slots.tier.store_ahead()
    host_slot, slot = states.begin_from_host(sequence, key)
    sequence.num_loading, sequence.num_computed_tokens = 1, 2 * PAGE_SIZE
    assert slots.tier.take_stores() == [(1, host_slot)] and slot == sequence.state_source
    return states, slots, sequence, key


@pytest.mark.parametrize("kept", [0, 1])
def test_a_state_that_has_not_arrived_is_found_by_nobody(kept):
    """Neither while it is on its way nor after its sequence has given up waiting for it."""
    states, slots, sequence, key = begun_from_host(kept)
    assert (sequence.state_source == sequence.state_slot) == (kept == 0)
    assert not states.is_kept(key)

    states.release(sequence)

    assert not states.is_kept(key) and slots.num_owned == 0
    states.check_integrity([])


def test_a_state_that_has_arrived_is_found_by_others_too():
    """It stays on the device when its sequence has gone on from it."""
    states, slots, sequence, key = begun_from_host(kept=1)

    sequence.num_loading = 0
    states.loaded(sequence)

    assert states.is_kept(key) and list(states.hits([b"", key], 2)) == [2]
    states.check_integrity([sequence])
    states.release(sequence)
    assert states.is_kept(key) and slots.num_cached == 1


def test_a_state_that_its_sequence_has_passed_is_not_copied():
    """The host keeps the last of a conversation, not one of each page."""
    slots = HBMPageManager(4, HostTier(4, staged=4))
    first, second = slots.alloc(2)
    slots.keep(first, b"first")
    slots.keep(second, b"second")
    slots.free([first, second])

    slots.evict_first(b"first")
    slots.tier.store_ahead()
    slots.alloc(2)

    assert b"second" in slots.tier and b"first" not in slots.tier and not slots.tier.pages_lost
    assert not slots.is_kept(b"first")


def test_the_tier_has_a_state_to_the_pages_of_each_conversation():
    """Of 64 pages and a state of the bytes of 16; each takes its part of all devices."""
    page = PagedAttentionCacheMetaData(
        num_layers=2, num_pages=1, page_size=16, num_kv_heads=2, head_dim=64, dtype=FLOAT32,
        states=StatePool(4, 1, (((2**17,), FLOAT32),)),
    )  # fmt: skip
    state = 4 * 4 * 2**17
    budget = host_budget(EngineConfig(host_cache_gib=1, max_num_batched_tokens=64), page, 2, 64)

    assert budget.states.num_slots == 2**30 // (64 * 2**16 + 2 * state) == 128
    assert budget.num_slots == (2**30 - 128 * 2 * state) // 2**16
    assert budget.num_bytes == 2**30 and budget.states.device_pages == 2 * (4 + 1)
    with pytest.raises(ConfigurationError, match=r"holds no page, .* beside the 4,194,304 of a state"):
        host_budget(EngineConfig(host_cache_gib=0.001), page, 2, 64)
