"""``StepLayout.unpack`` on a CPU, by a C++ kernel of our own, which XLA need not compile for each bucket."""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.attention.spec import PageTable
from caching.cpu_kernels import load, register
from engine.cpu_libraries import UNPACK
from engine.sampling.sampler_inputs import num_fields
from engine.speculation.history import History
from engine.step.inputs.layout import ModelInputBatch, StepLayout
from engine.step.inputs.slot_state import SlotState


@cache
def prepare() -> None:
    """Registers the kernels. Raises KernelsUnavailable."""
    for name in ("odriver_unpack", "odriver_unpack_drafts"):
        register(load(UNPACK), name)


def unpack(
    layout: StepLayout, packed: Array, state: SlotState, fed: Array | History
) -> tuple[SlotState, ModelInputBatch, Array]:
    """See ``StepLayout.unpack``."""
    drafts = isinstance(fed, History)
    rows, tables = layout.model_rows, state.page_tables
    shapes = [
        *(array.shape for array in (state.num_tokens, tables, state.parameters)),
        (layout.tokens,), (layout.tokens,), (rows,), (),
        (rows,), (layout.num_groups, rows, tables.shape[1]), (rows + 1,), (1,),
        (num_fields(drafts=drafts), layout.rows),
    ]  # fmt: skip
    call = jax.ffi.ffi_call(
        "odriver_unpack_drafts" if drafts else "odriver_unpack",
        [jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes],
        input_output_aliases={1: 0, 2: 1, 3: 2},
    )
    writes, of_fed = layout.writes, (fed.ids, fed.num_wrong) if isinstance(fed, History) else (fed,)
    num_tokens, tables, parameters, token_ids, positions, sampled, num_logits, *table, inputs = call(
        packed, state.num_tokens, tables, state.parameters, *of_fed,
        admissions=np.int64(writes.admissions), entries=np.int64(writes.entries),
    )  # fmt: skip
    kv_lens, page_indices, cu_q_lens, num_seqs = table
    batch = ModelInputBatch(
        token_ids, positions, sampled, num_logits, PageTable(kv_lens, page_indices, cu_q_lens, num_seqs)
    )
    return SlotState(num_tokens, tables, parameters), batch, inputs
