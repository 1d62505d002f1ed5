"""``verify`` on a CPU, by a C++ kernel of our own."""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import VERIFY
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.drafter import Drafter
from engine.speculation.history import History
from engine.speculation.prompt_lookup import PromptLookup


@cache
def _prepare() -> None:
    register(load(VERIFY), "odriver_verify")


def verify(sampled: Array, inputs: SamplerInputs, history: History, drafter: Drafter) -> tuple[Array, History]:
    """As ``verification.verify``, but for the history of the dump slot, and rows that do not sample
    or are not their sequence's first ones, which have no number of drafts."""
    _prepare()
    lookup = drafter if isinstance(drafter, PromptLookup) else PromptLookup(history.num_drafts, 0, 0)
    state = history.ids, history.num_new, history.num_wrong
    shapes = [(2, len(inputs.slots)), *(array.shape for array in state)]
    call = jax.ffi.ffi_call(
        "odriver_verify",
        [jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes],
        input_output_aliases={6: 1, 7: 2, 8: 3},
    )
    rows = inputs.slots, inputs.rows.positions, inputs.offsets, inputs.rests, inputs.looks_up.astype(np.int32)
    result, ids, num_new, num_wrong = call(
        sampled, *rows, *state,
        num_drafts=np.int64(lookup.num_drafts), shortest=np.int64(lookup.shortest), longest=np.int64(lookup.longest),
        earlier_width=np.int64(lookup.earlier_width),
    )  # fmt: skip
    return result, History(ids, num_new, num_wrong, history.num_drafts)
