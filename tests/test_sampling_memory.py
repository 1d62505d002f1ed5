"""The memory that pages leave to the sampler is what the compiler says that it takes."""

import jax
import pytest

from engine.devices.mesh import one_device
from engine.sampling.cpu_sampler import CPU_SAMPLING, prepare
from engine.sampling.operations import XLA_SAMPLING
from engine.scheduling.speculation import most_samples
from engine.speculation.speculative_config import SpeculativeConfig
from engine.step.compilation import compile_program, scratch_bytes
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes
from engine.step.sampling_programs import DRAW, PENALTIES, SamplingPrograms, sampling_bytes

NUM_TOKENS = 32_000
SMALL = 4096
"""Bytes of arrays that have a few numbers a row."""


@pytest.mark.parametrize(
    ("max_num_seqs", "num_drafts"), [(16, 0), pytest.param(2, 7, marks=pytest.mark.thorough)], ids=["rows", "drafts"]
)
@pytest.mark.parametrize(
    "operations", [CPU_SAMPLING, pytest.param(XLA_SAMPLING, marks=pytest.mark.thorough)], ids=["cpu", "xla"]
)
def test_no_program_between_logits_and_tokens_takes_more_than_is_set_aside(operations, max_num_seqs, num_drafts):
    """Beside the logits of the step and those that it reads, which others made of them; and hardly less is."""
    prepare()
    slots = SlotShapes(max_num_seqs, 1, 1, max_model_len=64, num_drafts=num_drafts)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts) if num_drafts else None
    programs = SamplingPrograms(slots, NUM_TOKENS, one_device(), speculation, operations)
    rows = most_samples(max_num_seqs, num_drafts)

    set_aside = sampling_bytes(max_num_seqs, rows, NUM_TOKENS, 1, operations)

    state = sum(leaf.nbytes for leaf in jax.tree.leaves((programs.new_bias(), programs.new_penalties())))
    logits = 4 * rows * NUM_TOKENS
    layout = StepLayout(rows, rows, has_drafts=bool(num_drafts))
    taken = {
        program.name: state + 2 * logits + scratch_bytes(compile_program(program).compiled)
        for program in programs.of(layout)
    }
    assert {DRAW, PENALTIES} < set(taken)
    assert 0.9 * set_aside < max(taken.values()) < set_aside + SMALL
