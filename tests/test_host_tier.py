"""A second tier of the prefix cache in the host's memory: the same tokens, and fewer of them computed."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from poisoned_engines import CopyingRunner, GreedyManager, engine_over, tokens_and_failed, tokens_of, turns

from caching.host_tier import HostTier
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_manager import HBMPageManager
from engine.build import build_engine as engine_of
from engine.config import EngineConfig
from engine.devices.device_errors import DeviceError
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.hosts.follower import execute_commands
from engine.hosts.other_processes import OtherProcesses
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.commands import Leave, decode_command, encode
from engine.step.compilation import num_compilations
from engine.step.executor import StepExecutor
from engine.step.host_cache import host_slots
from engine.step.host_cache.host_budget import HostBudget, check_host_memory, host_budget
from engine.step.host_cache.host_slots import HostMemory, copy_seconds
from engine.step.runner import eSurgeRunner
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
PAGE_SIZE, WINDOW, CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 11, 8, 3, 80


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """The programs of a Gemma 3 of two layers and random weights: two groups, one with a window."""
    config = {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": WINDOW}
    model = read_model_config(build_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3", **config))
    partition, backend = Partition(model), xla_backend(FLOAT32)
    decoder = Decoder(partition, nnx.Rngs(0))
    pool = dataclasses.replace(backend.one_page(partition, PAGE_SIZE, FLOAT32), num_pages=1 + 2 * 80)
    shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, pool, smallest_step=CHUNK, host=HostBudget(300, 12, 1))
    manager = GreedyManager(decoder, shapes, backend, DeviceMesh((jax.devices()[0],)))
    manager.compile(lambda progress: None)
    return manager


def build_engine(manager, *, num_pages=None, host=True, cost=None, run_ahead=1, slots=300, runner=CopyingRunner):
    """An engine over pages of its own, which are poisoned while they are free, with a tier behind them or none."""
    tier = HostTier(slots, manager.shapes.host.staged, page_bytes=1) if host else None
    pages = HBMPageManager(num_pages or manager.shapes.cache.num_pages, tier)
    cost = (cost or CopyCost(0.0, CHUNK)) if host else None
    memory = SequenceMemory(pages, manager.shapes.groups, cost=cost)
    return engine_over(manager, pages, memory, runner, run_ahead=run_ahead)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))])
def test_a_tier_gives_the_same_tokens_and_computes_fewer(manager, seed):
    """Conversations that the pool has no room for, in full and windowed groups, with preemption."""
    random = np.random.default_rng(seed)
    asked = list(turns(random, talks=8, rounds=5))
    small = 1 + 2 * int(random.integers(22, 30))
    alone = tokens_of(build_engine(manager, host=False), [make() for make in asked])
    without = build_engine(manager, num_pages=small, host=False)
    tokens_of(without, [make() for make in asked])
    engine = build_engine(manager, num_pages=small, run_ahead=int(random.integers(0, 3)))
    engine._runner.waits = seed % 2 == 0
    before = num_compilations()

    tokens = tokens_of(engine, [make() for make in asked])

    stats = engine.stats()
    assert tokens == alone and num_compilations() == before
    if engine._runner.waits:
        assert stats.host_bytes_loaded > 0 and stats.host_cache_hits > 0
        assert stats.prompt_tokens < without.stats().prompt_tokens


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("qwen3_5", marks=pytest.mark.thorough),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen3_sharded", "granite_hybrid", "deepseek_v3")
        ),
    ],
)
def test_two_devices_keep_their_shards_of_a_page(tmp_path, variant):
    """Under tensor parallelism each device's heads go to the host and come back, and so do its
    parts of states, by all that the operator sets."""
    directory = build_checkpoint(tmp_path, variant)
    config = EngineConfig(
        model=str(directory), tensor_parallel_size=2, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=64,
        page_size=4, num_pages=30, host_cache_gib=0.001,
    )  # fmt: skip
    asked = list(turns(np.random.default_rng(0), talks=5, rounds=2))
    engine = engine_of(config, lambda progress: None)
    expected = tokens_of(engine, [make(salt=None) for make in asked])

    tokens = tokens_of(engine, [make() for make in asked])

    stats = engine.stats()
    assert tokens == expected and stats.host_bytes_loaded > 0 and not stats.compilations_after_ready
    taken = stats.host_pages_total * stats.host_page_bytes + stats.host_states_total * stats.host_state_bytes
    assert 0.001 * 2**30 - stats.host_page_bytes < taken <= 0.001 * 2**30
    assert (engine._scheduler.memory.slots is None) or engine._scheduler.memory.slots.tier.pages_loaded > 0


def test_what_is_on_the_host_survives_sleep(manager):
    """A prompt that was computed before the device's pages were dropped comes back from the host."""
    engine = build_engine(manager, num_pages=42)
    asked = list(turns(np.random.default_rng(1), talks=6, rounds=1))
    first = tokens_of(engine, [make() for make in asked])
    loaded = engine.stats().host_bytes_loaded

    engine.sleep()
    assert engine.stats().pages_cached == 0
    engine.wake()
    again = tokens_of(engine, [make() for make in asked])

    assert again == first and engine.stats().host_bytes_loaded > loaded


def test_another_process_keeps_no_copies_that_have_arrived(manager):
    """It hears of copies, and nobody asks it which have arrived."""
    frames = []

    def runner(manager, seed):
        return eSurgeRunner(manager, seed, OtherProcesses(lambda command: frames.append(encode(command))))

    engine = build_engine(manager, num_pages=43, runner=runner)
    tokens_of(engine, [make() for make in turns(np.random.default_rng(0), talks=8, rounds=3)])
    follower = StepExecutor(manager, 0)
    heard = iter([*frames, encode(Leave(0, "the end"))])

    execute_commands(follower, lambda: decode_command(next(heard)))

    copies = [command for command in map(decode_command, frames) if isinstance(command, Copies)]
    [pages] = follower.host.kinds
    assert len(copies) > 20 and len(pages.storing) + len(pages.fetching) <= 4


def test_what_is_placed_and_evicted_at_once_is_stored_from_its_place(manager):
    """One plan has both copies of a page: the host gets what has come, and not what was there before."""
    kinds = HostMemory(manager.executable, manager.copied, manager.mesh)
    cache = jax.tree.map(lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), manager.new_cache())
    before = np.asarray(jax.tree.leaves(cache)[0])
    cache = kinds.copy(cache, Copies([(3, 0)], [], [], of_states=False))
    cache = kinds.copy(cache, Copies([], [], [0], of_states=False))
    cache = kinds.copy(cache, Copies([(5, 1)], [[5]], [1], of_states=False))

    cache = kinds.copy(cache, Copies([], [[7]], [], of_states=False))

    after = np.asarray(jax.tree.leaves(cache)[0])
    per_layer = manager.shapes.cache.num_pages
    for first in range(0, len(before), per_layer):
        np.testing.assert_array_equal(after[first + 7], before[first + 3])


def test_an_emptied_prefix_cache_is_empty_on_the_host_too(manager):
    """After a reset nothing comes back, as the weights may have changed."""
    engine = build_engine(manager, num_pages=42)
    asked = list(turns(np.random.default_rng(1), talks=6, rounds=1))
    tokens_of(engine, [make() for make in asked])
    stats = engine.stats()

    assert stats.host_pages_cached > 0
    assert engine.reset_prefix_cache() == stats.host_pages_cached + stats.pages_cached

    assert engine.stats().host_pages_cached == 0
    tokens_of(engine, [asked[0]()])
    assert engine.stats().host_bytes_loaded == stats.host_bytes_loaded


def test_who_has_another_salt_has_nothing_on_the_host(manager):
    """Tenants share no pages there either."""
    engine = build_engine(manager, num_pages=42)
    asked = list(turns(np.random.default_rng(1), talks=6, rounds=1))
    tokens_of(engine, [make() for make in asked])
    loaded, stranger = engine.stats().host_bytes_loaded, asked[0]()
    stranger.salt = b"stranger"

    tokens_of(engine, [stranger])

    assert engine.stats().host_bytes_loaded == loaded


def test_what_is_computed_sooner_is_not_copied(manager):
    """Where a copy takes longer than the tokens that it saves, nothing goes to the host or comes from it."""
    cost = CopyCost(1e6, CHUNK)
    engine = build_engine(manager, num_pages=42, cost=cost)
    cost.token_seconds = 100.0
    asked = list(turns(np.random.default_rng(1), talks=6, rounds=3))

    tokens_of(engine, [make() for make in asked])

    assert cost.token_seconds < 100, "no step was learned from"
    assert engine.stats().host_bytes_stored == engine.stats().host_bytes_loaded == 0


def test_after_a_failed_step_nothing_on_the_host_is_trusted(manager, monkeypatch):
    """A step fails while pages are on their way: who was in it ends, all others are given what they would be."""
    asked = list(turns(np.random.default_rng(2), talks=6, rounds=4))
    alone = tokens_of(build_engine(manager, host=False), [make() for make in asked])
    engine, kept = build_engine(manager, num_pages=46), []
    collect, steps = engine._runner.collect, iter(range(10**6))

    def failing(step):
        if next(steps) % 40 == 39:
            kept.append(engine.stats().host_pages_cached)
            raise DeviceError("INTERNAL: a wire has come loose")
        return collect(step)

    monkeypatch.setattr(engine._runner, "collect", failing)
    tokens, failed = tokens_and_failed(engine, [make() for make in asked], lost="host_pages_cached")

    assert max(kept) > 0 and failed and len(failed) < len(asked) and engine.stats().host_bytes_loaded > 0
    assert all(tokens[name] == alone[name] for name in alone.keys() - failed)


def test_a_tier_is_refused_that_the_host_has_no_memory_for():
    """The message has the numbers; a tier of not even a page, or without a prefix cache, is refused as well."""
    page = PagedAttentionCacheMetaData(
        num_layers=2, num_pages=1, page_size=16, num_kv_heads=2, head_dim=64, dtype=FLOAT32
    )
    budget = host_budget(EngineConfig(host_cache_gib=1, max_num_batched_tokens=64), page, 2, 64)

    assert (budget.bytes_per_slot, budget.num_slots, budget.staged) == (2**16, 2**14, 16)
    assert budget.device_pages == 2 * (16 + 16)
    assert host_budget(EngineConfig(), page, 2, 64) is None
    check_host_memory(budget, 0)
    with pytest.raises(ConfigurationError, match=r"host_cache_gib asks for 1,073,741,824 bytes .* are free beside"):
        check_host_memory(budget, 2**50)
    with pytest.raises(ConfigurationError, match="holds no page, which takes 65,536 bytes"):
        host_budget(EngineConfig(host_cache_gib=0.00001), page, 2, 64)
    with pytest.raises(ConfigurationError, match=r"0 \(none\) to 65536, not -1"):
        EngineConfig(host_cache_gib=-1)
    with pytest.raises(ConfigurationError, match="host_cache_gib is a part of the prefix cache"):
        EngineConfig(host_cache_gib=1, enable_prefix_caching=False)


def test_the_price_of_a_copy_is_measured(monkeypatch):
    """Seconds for one of several that are copied together, the best of three times."""
    ticks = iter((0.0, 8.0, 10.0, 12.0, 20.0, 23.0))
    monkeypatch.setattr(host_slots, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    assert copy_seconds(2**10, 4) == 0.5


def test_a_slot_that_is_to_be_read_is_not_overwritten():
    """A pinned slot keeps its contents, whatever is evicted meanwhile, and is free again when it has been read."""
    tier = HostTier(1, staged=4)
    tier.offer(1, b"a")
    tier.store_ahead()
    slot = tier.pin(b"a")
    tier.evict(2, b"b")

    assert tier.take_stores() == [(1, slot)] and tier.pages_lost == 1 and b"b" not in tier
    tier.forget([b"a"])
    tier.evict(3, b"c")
    assert not tier.take_stores() and b"c" not in tier
    tier.unpin(slot)
    tier.evict(4, b"d")
    assert tier.take_stores() == [(4, slot)]
    tier.check_integrity([])
