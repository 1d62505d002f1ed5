"""What the programs between logits and tokens know of a step's rows, as one array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.sampling.needs import Need
from engine.sampling.sampler import SamplingRows

F32, I32, U32 = (np.dtype(kind) for kind in (np.float32, np.int32, np.uint32))
PARAMETERS = {"temperature": F32, "top_k": I32, "top_p": F32, "min_p": F32, "seeds": U32, "needs": I32}
"""Rows of i32[len(PARAMETERS), slots], the sampling parameters of all slots bit by bit, and what
they stand for. ``needs`` are Need flags; the others are those of ``SamplingRows``."""
NUM_FIELDS = 4 + len(PARAMETERS)
NUM_DRAFT_FIELDS = 3
"""Further ones where rows may have drafts."""


def num_fields(*, drafts: bool) -> int:
    """Those of a packed array, whose rows may have ``drafts`` or not."""
    return NUM_FIELDS + (NUM_DRAFT_FIELDS if drafts else 0)


def pack_inputs(slots: Array, samples: Array, decodes: Array, lens: Array, parameters: Array, *drafts: Array) -> Array:
    """i32[NUM_FIELDS, rows] of SamplerInputs, on the device.

    By row: its slot, whether it samples, whether it was fed the token that its slot sampled last,
    and its tokens, i32[rows] each. ``parameters`` are those of all slots. ``drafts`` are
    ``offsets``, ``rests`` and whether any drafts are looked for, where rows may have drafts.
    """
    own = parameters.at[:, slots].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.concatenate([jnp.stack([slots, samples, decodes, lens]), own, *(each[None] for each in drafts)])


@dataclass(frozen=True)
class SamplerInputs:
    """What the programs between logits and tokens know of each row, all [rows]."""

    packed: Array
    """i32[fields, rows] what ``pack_inputs`` gave, of which the others are."""
    slots: Array
    """i32, where the sampled token is kept: the dump slot if the row samples none."""
    decodes: Array
    """bool, whether the row was fed the token that its slot sampled last."""
    rows: SamplingRows
    needs: Array
    """i32 Need flags."""
    offsets: Array
    """i32, of rows of one sequence, which are as many as it samples, the place among them."""
    rests: Array
    """i32, those behind it."""
    looks_up: Array
    """bool[], whether drafts are looked for behind the tokens of any row."""
    dump_slot: int

    @classmethod
    def unpack(cls, packed: Array, num_slots: int) -> "SamplerInputs":
        """Of what ``pack_inputs`` gave, where the last of the slots is the dump slot."""
        slots, samples, decodes, lens, *own = jnp.unstack(packed[:NUM_FIELDS])
        alone = jnp.zeros_like(slots)
        offsets, rests, looks_up = jnp.unstack(packed[NUM_FIELDS:]) if len(packed) > NUM_FIELDS else 3 * (alone,)
        columns = {
            name: jax.lax.bitcast_convert_type(column, dtype)
            for (name, dtype), column in zip(PARAMETERS.items(), own, strict=True)
        }
        needs, dump_slot = columns.pop("needs"), num_slots - 1
        slots = jnp.where(samples > 0, slots, np.int32(dump_slot))
        return cls(
            packed,
            slots,
            decodes > 0,
            SamplingRows(**columns, positions=lens),
            needs,
            offsets,
            rests,
            looks_up[0] > 0,
            dump_slot,
        )

    def slots_that(self, need: Need) -> Array:
        """i32[rows] slots of rows that sample and need this; the dump slot of others."""
        return jnp.where(self.needs & np.int32(need) != 0, self.slots, np.int32(self.dump_slot))
