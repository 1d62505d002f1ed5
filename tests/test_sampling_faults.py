"""What a CPU draws from logits, and says of it, is held against numpy's before it serves: each fault is found out."""

from dataclasses import replace

import numpy as np
import pytest
from kernels_needed import kernels_needed

from engine.sampling import cpu_sampler
from engine.sampling.cpu_sampler import CPU_SAMPLING
from engine.sampling.operations import XLA_SAMPLING
from engine.sampling.sampler_inputs import NUM_FIELDS, PARAMETERS
from engine.step.kernel_checks import sampling_faults
from engine.step.kernel_checks.sampling_faults import sampling_fault


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    """The CPU's kernels, without which there is nothing to check."""
    with kernels_needed():
        cpu_sampler.prepare()


def asking(**named):
    """A change of what rows ask a draw for."""

    def change(logits, packed):
        for name, value in named.items():
            number = NUM_FIELDS - len(PARAMETERS) + [*PARAMETERS].index(name)
            packed = packed.at[number].set(np.array(value, PARAMETERS[name]).view(np.int32))
        return logits, packed

    return change


WRONG_DRAWS = {
    "temperature": asking(temperature=1),
    "greedy": asking(temperature=0),
    "top_k": asking(top_k=0),
    "top_p": asking(top_p=1),
    "min_p": asking(min_p=0),
    "seeds": asking(seeds=0),
    "positions": lambda logits, packed: (logits, packed.at[3].add(1)),
    "the last of equals": lambda logits, packed: (logits.at[:, 30 + 202].add(1e-5), packed),
    "a part of a block": lambda logits, packed: (logits.at[:, 256:].set(-99), packed),
    "one row": lambda logits, packed: (logits.at[-1, 68].set(-99), packed),
}


@pytest.mark.parametrize("wrong", WRONG_DRAWS)
def test_a_draw_that_is_wrong_is_found_out(monkeypatch, wrong):
    """Whatever it leaves out of what a row asks for, or of its logits."""

    def draw(logits, inputs, *rest):
        changed, packed = WRONG_DRAWS[wrong](logits, inputs.packed)
        return CPU_SAMPLING.draw(changed, replace(inputs, packed=packed), *rest)

    monkeypatch.setattr(sampling_faults, "CPU_SAMPLING", replace(CPU_SAMPLING, draw=draw))

    assert "draw differs from numpy's by" in (sampling_fault() or "")


@pytest.mark.parametrize("wrong", ["last token", "log-probability", "rank", "likeliest token"])
def test_what_is_kept_and_said_of_a_draw_is_checked_too(monkeypatch, wrong):
    """The token that the next step is fed, and each part of the log-probabilities."""

    def draw(*given):
        tokens, last = CPU_SAMPLING.draw(*given)
        return tokens, last.at[1].add(wrong == "last token")

    def compute_logprobs(logits, tokens):
        found = CPU_SAMPLING.compute_logprobs(logits, tokens)
        column = {"log-probability": -1, "rank": 1, "likeliest token": 2}.get(wrong)
        return found if column is None else found.at[-1, column].add(2**20)

    changed = replace(CPU_SAMPLING, draw=draw, compute_logprobs=compute_logprobs)
    monkeypatch.setattr(sampling_faults, "CPU_SAMPLING", changed)

    assert f"{wrong} differs from" in (sampling_fault() or "")


@pytest.mark.thorough
def test_what_a_draw_is_held_against_is_what_xla_draws(monkeypatch):
    """Of the same logits, rows and key."""
    monkeypatch.setattr(sampling_faults, "CPU_SAMPLING", XLA_SAMPLING)

    assert sampling_faults._draw_fault() is None
