"""Layers with windows: which pages a sequence owns there, and that a model gives the same tokens as if it kept all."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from poisoned_engines import GreedyManager, engine_over, tokens_of

from caching.cache_groups import CacheGroups
from caching.metadata import pages_for
from caching.page_manager import Found, HBMPageManager
from caching.prefix_cache import in_group
from engine.devices.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.layers.cache_layout import MOST_GROUPS, cache_layout
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
PAGE_SIZE, CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN, WINDOW = 4, 8, 3, 96, 8


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A block of attention without anything particular."""
    return read_model_config(build_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral")).blocks[0]


def build_blocks(block, *windows):
    """Blocks with these windows, alike otherwise."""
    scores = block.mixer.scores
    return tuple(
        replace(block, mixer=replace(block.mixer, scores=replace(scores, window=window))) for window in windows
    )


@pytest.mark.parametrize(
    ("windows", "expected", "layers"),
    [
        ([None] * 32, (None,), 32),
        ([4096] * 32, (4096,), 32),
        ([512, 512, 512, 512, 512, None] * 4 + [512] * 2, (None, *[512] * 6), 4),
        ([1024, 1024, 1024, 1024, 1024, None] * 10 + [1024] * 2, (None, *[1024] * 6), 10),
        ([128, None] * 12, (None, 128), 12),
        ([None] * 21 + [64] * 7, (None, None, None, 64), 7),
        ([None], (None,), 1),
    ],
    ids=["one kind", "all windowed", "gemma 3 1b", "gemma 3 27b", "gpt-oss", "qwen2", "one layer"],
)
def test_layers_of_one_kind_share_a_page_table(mistral, windows, expected, layers):
    """Groups are of equally many layers of one window; a model of one kind has one group."""
    layout = cache_layout(build_blocks(mistral, *windows))

    assert (layout.windows, layout.num_layers) == (expected, layers)
    assert len(set(layout.places)) == len(windows) and len(layout.windows) <= MOST_GROUPS
    for window, (place,) in zip(windows, layout.places, strict=True):
        assert layout.windows[place.group] == window and place.layer < layers


def test_a_layer_that_others_read_keeps_what_the_widest_of_them_sees(mistral):
    """Gemma 4's last layers read another's keys: they share its place, and its pages stay as long as any needs them."""
    near, wide, reader = build_blocks(mistral, 8, None, None)
    reader = replace(reader, mixer=replace(reader.mixer, kv_source=0))

    layout = cache_layout((near, wide, reader))

    assert layout.windows == (None,) and layout.num_layers == 2
    assert layout.places[2] == layout.places[0] != layout.places[1]


@given(
    page_size=st.integers(1, 9),
    window=st.integers(1, 40),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
def test_a_window_has_the_pages_of_every_key_that_a_chunk_sees(page_size, window, chunks):
    """From the first key that its first query sees to its last token, within the most that is admitted for it."""
    groups, total = CacheGroups(page_size, (None, window), max(chunks)), sum(chunks)
    num_pages, start = pages_for(total, page_size), 0
    for chunk in chunks:
        first, past = groups.span(1, start, num_pages)

        assert first * page_size <= max(0, start - window + 1) and start + chunk <= past * page_size
        assert past - first <= groups.most[1]
        assert groups.pages_from(start, total) == num_pages + past - first <= groups.pages_of(total)
        start += chunk


@given(
    windows=st.sampled_from([(None,), (None, 5), (7,), (None, 3, 3, 9)]),
    num_pages=st.integers(0, 60),
    longest=st.integers(1, 200),
)
def test_the_longest_sequence_that_fits_is_found(windows, num_pages, longest):
    """Its pages suffice, and those of a page more do not, unless the model ends there."""
    groups = CacheGroups(4, windows, 6)

    tokens = groups.tokens_in(num_pages, longest)

    assert groups.pages_of(tokens) <= num_pages
    assert tokens == longest or (tokens % 4 == 0 and groups.pages_of(tokens + 4) > num_pages)


def test_a_waiting_prompt_is_looked_up_in_windows_once(monkeypatch):
    """Where nothing has changed, the next look costs no more than the hit's own window."""
    pages = HBMPageManager(300)
    memory = SequenceMemory(pages, CacheGroups(PAGE_SIZE, (WINDOW,), CHUNK))
    waiting = Sequence("a", [1] * 801, SamplingParams(), frozenset(), 1, seed=0)
    looks = []
    monkeypatch.setattr(pages, "is_kept", lambda key, is_kept=pages.is_kept: looks.append(key) or is_kept(key))

    memory.find(waiting)
    first = len(looks)
    memory.find(waiting)

    assert first == 200 and len(looks) - first <= memory.groups.behind[0]


def test_of_a_hit_only_its_own_pages_count_as_owned():
    """A window ends it before a page whose owner has copies of the pages before: admission takes all of those."""
    pages = HBMPageManager(9)
    memory = SequenceMemory(pages, CacheGroups(PAGE_SIZE, (None, PAGE_SIZE + 1), CHUNK))
    sequence = Sequence("a", [1] * (3 * PAGE_SIZE + 1), SamplingParams(), frozenset(), 1, seed=0)
    sequence.salt = b""
    first, second, third = sequence.page_keys_to(3, PAGE_SIZE)
    cached, owned = pages.alloc(3), pages.alloc(1)
    for page, key in zip(cached, (first, second, in_group(second, 1)), strict=True):
        pages.keep(page, key)
    pages.free(reversed(cached))
    pages.keep(owned[0], third)
    pages.alloc(1)

    assert not memory.begin(sequence, Found(2, owned=2), spare=0)  # as it was a plan ago, perhaps
    assert (sequence.pages, pages.num_free, pages.num_cached) == ([], 3, 3)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Two programs of a Gemma 3 of four layers and random weights: one lets pages go behind windows, one keeps all."""
    config = {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": WINDOW}
    model = read_model_config(build_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3", **config))
    partition, backend = Partition(model), xla_backend(FLOAT32)
    decoder = Decoder(partition, nnx.Rngs(0))
    one_page = backend.one_page(partition, PAGE_SIZE, FLOAT32)
    assert one_page.windows == (None, WINDOW)
    managers = {}
    for keeps_all in (False, True):
        windows = (None,) * 2 if keeps_all else one_page.windows
        pool = replace(one_page, num_pages=1 + 2 * 80, windows=windows)
        shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, pool, smallest_step=CHUNK)
        managers[keeps_all] = GreedyManager(decoder, shapes, backend, DeviceMesh((jax.devices()[0],)))
        managers[keeps_all].compile(lambda progress: None)
    return managers


def build_engine(manager, num_pages=None, run_ahead=1):
    """An engine over pages of its own, which are poisoned while they are free."""
    pages = HBMPageManager(num_pages or manager.shapes.cache.num_pages)
    return engine_over(manager, pages, SequenceMemory(pages, manager.shapes.groups), run_ahead=run_ahead), pages


def conversations(random, count):
    """Prompts that begin alike, some of them with what an earlier one was given."""
    system = random.integers(1, 140, 24).tolist()
    for number in range(count):
        prompt = system[: random.integers(4, 25)] + random.integers(1, 140, random.integers(1, 30)).tolist()
        greedy = SamplingParams(temperature=0)
        yield partial(Sequence, str(number), prompt, greedy, frozenset(), int(random.integers(8, 24)), seed=0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_a_model_with_windows_gives_the_tokens_of_one_that_keeps_all(compiled, seed):
    """With prefix hits, more sequences than slots, and pages so few that some are preempted."""
    asked = list(conversations(np.random.default_rng(seed), 5))
    expected = tokens_of(build_engine(compiled[True])[0], [build(salt=None) for build in asked])

    engine, pages = build_engine(compiled[False], num_pages=25, run_ahead=seed % 3)
    first = tokens_of(engine, [build() for build in asked])
    again = tokens_of(engine, [build() for build in asked])

    assert first == again == expected
    stats = engine.stats()
    assert stats.preemptions and stats.prefix_cache_hits and pages.num_cached


@pytest.mark.thorough
def test_windows_own_what_they_see_and_no_more(compiled):
    """A sequence of n tokens: its pages in the group that keeps all, and in the other those of a window."""
    engine, pages = build_engine(compiled[False])
    engine.add(Sequence("a", [5] * 30, SamplingParams(temperature=0), frozenset(), 20, seed=0))
    while engine.has_work:
        engine.step()
        computed = engine._scheduler._running.get("a")
        if computed is not None and computed.num_computed_tokens > computed.num_prefill_tokens + 1:
            kept = pages_for(computed.num_computed_tokens, PAGE_SIZE)
            window = pages_for(WINDOW - 1, PAGE_SIZE) + 1
            assert pages.num_owned == kept + window
