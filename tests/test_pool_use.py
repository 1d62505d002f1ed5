"""The memory that sequences own is what arithmetic says, at every step, and gives the same tokens
as one that keeps everything.

The engines are as they are served, but memory that nobody owns is NaN: what is counted as free is of no use to anybody.
"""

from dataclasses import replace
from math import ceil

import jax
import numpy as np
import pytest
from checkpoints import build_checkpoint
from loading import load
from poisoned_engines import GreedyManager, PoisonedRunner, engine_over, tokens_of

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.devices.mesh import one_device
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.sampling_params import SamplingParams
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.backend_choice import xla_backend
from engine.step.step_shapes import StepShapes

FLOAT32 = np.dtype(np.float32)
PAGE_SIZE, CHUNK, MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 16, 4, 480
WINDOW = 24
LENGTHS = [(290, 60), (7, 150), (411, 24), (60, 90), (133, 40), (452, 9)]
"""Tokens of prompts and outputs."""
WITHIN = 0.02
GREEDY = SamplingParams(temperature=0)


class RememberingRunner(PoisonedRunner):
    """Knows the last plan."""

    plan = None

    def dispatch(self, plan):
        """Remember it."""
        self.plan = plan
        return super().dispatch(plan)


def compiled(directory, kept=0):
    """The greedy programs of a checkpoint, over a pool that has room for everything."""
    model, backend = read_model_config(directory), xla_backend(FLOAT32)
    one = backend.one_page(Partition(model), PAGE_SIZE, FLOAT32)
    states = one.states and replace(one.states, num_slots=1 + MAX_NUM_SEQS + kept)
    pages = 1 + len(one.windows) * MAX_NUM_SEQS * MAX_MODEL_LEN // PAGE_SIZE
    pool = replace(one, num_pages=pages, states=states)
    shapes = StepShapes(MAX_NUM_SEQS, CHUNK, MAX_MODEL_LEN, pool, smallest_step=CHUNK)
    manager = GreedyManager(load(directory, backend.weight_format(FLOAT32)), shapes, backend, one_device())
    manager.compile(lambda progress: None)
    return manager


def build_engine(manager, groups=None, run_ahead=1):
    """An engine with a memory of its own."""
    shapes, slots, states = manager.shapes, None, None
    pages = HBMPageManager(shapes.cache.num_pages)
    if shapes.cache.states is not None:
        slots = HBMPageManager(shapes.cache.states.num_slots)
        states = SequenceStates(slots, PAGE_SIZE, MAX_NUM_SEQS)
    memory = SequenceMemory(pages, groups or shapes.groups, states)
    return engine_over(manager, pages, memory, RememberingRunner, run_ahead=run_ahead, slots=slots)


def asked():
    """Greedy sequences of very different lengths."""
    tokens = np.random.default_rng(3).integers(1, 140, (len(LENGTHS), MAX_MODEL_LEN))
    return [
        Sequence(str(number), tokens[number, :length].tolist(), GREEDY, frozenset(), count, seed=0)
        for number, (length, count) in enumerate(LENGTHS)
    ]


def steps(engine, sequences):
    """After each step its plan, and the sequences that then run."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        yield engine._runner.plan, list(engine._scheduler._running)


def prompt_left(sequence, plan):
    """Tokens of its prompt that the sequence had yet to compute before a plan; None if it decodes in it."""
    chunk = [
        count for row, count in enumerate(plan.counts) if plan.sequences[row] is sequence and row >= plan.num_decodes
    ]
    if not chunk and not sequence.prefilling:
        return None
    return sequence.num_prefill_tokens - sequence.num_computed_tokens + sum(chunk)


def pages_by_arithmetic(sequence, plan, windows, run_ahead):
    """Of a sequence: in layers without a window those of all tokens. In others the page of the
    first query that has not landed, before it as many as n - 1 tokens fill, and behind it for a
    prompt, from its admission on, what one step fills. While a sequence decodes, its query is the
    first of the page, as pages come and go together.
    """
    left = prompt_left(sequence, plan)
    if left is None:
        tokens = sequence.num_computed_tokens
        late = (tokens - 1) // PAGE_SIZE * PAGE_SIZE - max(0, run_ahead - 1)
        query = max(sequence.num_prefill_tokens, late)
    else:
        tokens, query = sequence.num_prefill_tokens, sequence.num_prefill_tokens - left
    pages, count = ceil(tokens / PAGE_SIZE), 0
    for window in windows:
        behind = pages if window is None else ceil((window - 1) / PAGE_SIZE)
        first = max(0, query // PAGE_SIZE - behind)
        count += min(pages - first, behind + 1 + ceil((CHUNK - 1) / PAGE_SIZE))
    return count


def states_by_arithmetic(sequence):
    """Of a sequence: the one that its steps write, and the one that a row left at the end of a page for the next to read.

    Those of pages before can be found by others, as their tokens have landed: no more than one step is ahead.
    """
    computed = sequence.num_computed_tokens
    return 1 + (computed > 0 and computed % PAGE_SIZE == 0)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Five layers of six have a window, as in Gemma 3."""
    directory = tmp_path_factory.mktemp("gemma")
    layers = {"num_hidden_layers": 6, "sliding_window_pattern": 6, "sliding_window": WINDOW}
    return compiled(build_checkpoint(directory, "gemma3", max_position_embeddings=MAX_MODEL_LEN, **layers))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Two layers of three have a state, as most have in Qwen3.5."""
    directory = tmp_path_factory.mktemp("qwen")
    return compiled(build_checkpoint(directory, "qwen3_5", max_position_embeddings=MAX_MODEL_LEN), kept=6)


@pytest.mark.thorough
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_model_with_windows_owns_what_arithmetic_says(gemma, run_ahead):
    """Within 2 % at every step, and its tokens are those of a cache that keeps all pages of all layers.

    That cache is read by the same compiled steps: the window is in their masks alone.
    """
    windows, used, sequences = gemma.shapes.cache.windows, [], asked()
    engine = build_engine(gemma, run_ahead=run_ahead)
    for plan, running in steps(engine, sequences):
        expected = sum(pages_by_arithmetic(sequence, plan, windows, run_ahead) for sequence in running)
        used.append((engine.stats().pages_owned, expected))
    everything = build_engine(gemma, CacheGroups(PAGE_SIZE, (None,) * len(windows), CHUNK), run_ahead)
    tokens = asked()
    kept = [everything.stats().pages_owned for _ in steps(everything, tokens)]

    page = 2 * 2 * 16 * PAGE_SIZE * FLOAT32.itemsize  # keys and values of two heads of 16
    assert windows == (None, *[WINDOW] * 5) and gemma.shapes.cache.bytes_per_page == page
    assert all(abs(owned - expected) <= WITHIN * expected for owned, expected in used), used
    assert max(kept) > 3 * max(owned for owned, _ in used)
    assert [each.output_token_ids for each in sequences] == [each.output_token_ids for each in tokens]


@pytest.mark.thorough
@pytest.mark.parametrize("run_ahead", [1, 0])
def test_a_model_with_states_owns_what_arithmetic_says(qwen, run_ahead):
    """Pages and states at every step, and its tokens are those of a model that begins with the
    first token for each of them."""
    pool, used, sequences = qwen.shapes.cache, [], asked()
    engine = build_engine(qwen, run_ahead=run_ahead)
    for plan, running in steps(engine, sequences):
        pages = sum(pages_by_arithmetic(sequence, plan, pool.windows, run_ahead) for sequence in running)
        states = sum(states_by_arithmetic(sequence) for sequence in running)
        used.append((engine._scheduler.memory.pages.num_owned, pages, engine._scheduler.memory.slots.num_owned, states))
    anew = build_engine(qwen, run_ahead=0)
    again = {
        (number, count): again_from_the_first(sequence, f"{number} {count}", count)
        for number, sequence in enumerate(sequences)
        for count in range(0, sequence.max_tokens, 12)
    }
    first = tokens_of(anew, again.values())

    taps, heads, keys, values = 3, 4, 4 * 8, 4 * 12
    state = 2 * FLOAT32.itemsize * ((taps - 1) * (2 * keys + values) + keys * values // heads)
    page = 2 * 2 * 16 * PAGE_SIZE * FLOAT32.itemsize  # keys and values of two heads of 16, in one layer
    assert (pool.bytes_per_page, pool.bytes_per_slot) == (page, state)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner._executor._cache)) == pool.num_bytes
    for owned, pages, slots, states in used:
        expected = pages * page + states * state
        assert abs(owned * page + slots * state - expected) <= WITHIN * expected, used
    assert engine.stats().recurrent_states_cached and not anew.stats().prefix_cache_hits
    assert all(
        first[sequence.request_id] == [sequences[number].output_token_ids[count]]
        for (number, count), sequence in again.items()
    )


def again_from_the_first(sequence, name, count):
    """A sequence that computes all tokens up to the first ``count`` of the output, and the next, sharing nothing."""
    prompt = sequence.prompt_token_ids + sequence.output_token_ids[:count]
    return Sequence(name, prompt, GREEDY, frozenset(), 1, seed=0, salt=None)
