"""Recurrent and latent families in many forms at once: quantised or on two devices, chunked,
preempted, from prefixes of both tiers, several steps ahead. Each request is given what it is given
alone, which the goldens hold against transformers.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint
from poisoned_engines import CopyingRunner, GreedyManager, ask, engine_over, tokens_of, turns
from state_checkpoints import STATE_VARIANTS

from caching.page_manager import HBMPageManager
from engine.build import build
from engine.config import EngineConfig
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence_memory import SequenceMemory

MAX_NUM_SEQS, CHUNK, KEPT = 3, 6, 2
LATENT_VARIANTS = ("deepseek_v2_lite", "deepseek_v3_plain", "glm4_moe_lite")
FORMS = {
    "int8": {"quantization": "int8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
    "two devices": {"tensor_parallel_size": 2},
}
"""Latents have no form of 8 bits."""
SOME = (
    "qwen3_next",
    "falcon_h1",
    "granite_hybrid",
    "lfm3",
    "olmo_hybrid",
    "bamba",
    "deepseek_v2_lite",
    "glm4_moe_lite",
)
"""Of every recurrence, beside whatever there is, and of latents, a variant; those of all others are exhaustive."""


def greedy_steps(served, decoders, shapes):
    """A Begin of what greedy requests run, in steps of one size."""
    manager = GreedyManager(decoders.model, replace(shapes, smallest_step=CHUNK), served.backend, served.mesh)
    manager.begin()
    return manager


def build_engine(manager, num_pages, *, run_ahead, host=True):
    """An engine over so many pages, with a tier behind them or none."""
    shapes, slots, states = manager.shapes, None, None
    pages = HBMPageManager(num_pages, shapes.host.tier() if host else None)
    if shapes.cache.states is not None:
        slots = HBMPageManager(1 + MAX_NUM_SEQS + KEPT, shapes.host.states.tier() if host else None)
        states = SequenceStates(slots, shapes.cache.page_size, MAX_NUM_SEQS)
    memory = SequenceMemory(pages, shapes.groups, states, CopyCost(0.0, CHUNK) if host else None)
    return engine_over(manager, pages, memory, CopyingRunner, run_ahead=run_ahead, slots=slots)


def pairs():
    """Each variant and form: in a thorough run one form of each of SOME, in turn."""
    for variant in (*STATE_VARIANTS, *LATENT_VARIANTS):
        for place, form in enumerate(FORMS):
            is_thorough = variant in SOME and place == SOME.index(variant) % len(FORMS)
            yield pytest.param(variant, form, marks=pytest.mark.thorough if is_thorough else pytest.mark.exhaustive)


@pytest.mark.parametrize(("variant", "form"), [*pairs()])
def test_every_form_of_a_family_gives_what_it_gives_alone(tmp_path, variant, form):
    """Conversations that neither the pages nor the states of the device have room for."""
    given = dict(FORMS[form])
    if variant in LATENT_VARIANTS:
        given.pop("kv_cache_dtype", None)
    assert VARIANTS[variant].stored == "float32"
    directory = build_checkpoint(tmp_path, variant, max_position_embeddings=96)
    config = EngineConfig(
        model=str(directory), max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=CHUNK, max_model_len=80, page_size=4,
        num_pages=120, host_cache_gib=0.002, **given,
    )  # fmt: skip
    manager = build(config, lambda progress: None, lambda compiled: compiled.manager, greedy_steps)
    random = np.random.default_rng(1)
    asked = [partial(ask, *make.args[:2], int(random.integers(10, 20))) for make in turns(random, talks=5, rounds=3)]
    alone = build_engine(manager, 120, run_ahead=0, host=False)
    expected = {}
    for make in asked:
        expected |= tokens_of(alone, [make(salt=None)])
    engine = build_engine(manager, 24, run_ahead=3)

    tokens = tokens_of(engine, [make() for make in asked])

    stats = engine.stats()
    assert tokens == expected
    assert stats.preemptions and stats.host_cache_hits
    assert engine._scheduler.memory.slots is None or engine._scheduler.memory.slots.tier.pages_loaded
