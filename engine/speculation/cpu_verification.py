"""``verify`` on a CPU, by a C++ kernel of our own."""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import VERIFY
from engine.sampling.sampler_inputs import NUM_FIELDS, SamplerInputs
from engine.speculation.drafter import Drafter
from engine.speculation.history import History
from engine.speculation.prompt_lookup import PromptLookup


@cache
def prepare() -> None:
    """Registers the kernel. Raises KernelsUnavailable."""
    register(load(VERIFY), "odriver_verify")


def verify(sampled: Array, inputs: SamplerInputs, history: History, drafter: Drafter) -> tuple[Array, History]:
    """As ``verification.verify``, but for the history of the dump slot, and rows that do not sample
    or are not their sequence's first ones, which have no number of drafts.

    It reads the inputs packed: XLA runs the parts of a program one after the other while they are
    eight at most, and else wakes threads for them, which takes longer than all of them do.
    """
    lookup = drafter if isinstance(drafter, PromptLookup) else PromptLookup(history.num_drafts, 0, 0)
    state = history.ids, history.num_new, history.num_wrong
    shapes = [(2, len(sampled)), *(array.shape for array in state)]
    call = jax.ffi.ffi_call(
        "odriver_verify",
        [jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes],
        input_output_aliases={2: 1, 3: 2, 4: 3},
    )
    result, ids, num_new, num_wrong = call(
        sampled, inputs.packed, *state,
        num_drafts=np.int64(lookup.num_drafts), shortest=np.int64(lookup.shortest), longest=np.int64(lookup.longest),
        earlier_width=np.int64(lookup.earlier_width), of_drafts=np.int64(NUM_FIELDS),
    )  # fmt: skip
    return result, History(ids, num_new, num_wrong, history.num_drafts)
