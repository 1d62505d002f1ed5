"""What a step knows of a sequence beside its new tokens lives on the device, by slot.

A step's rows are (slot, count, samples) alone: positions, lengths and page tables are made from
this state. What changes in it travels with a step (``SlotWrites``): the sequences that got a slot,
and the pages by which page tables have grown. Changes that a step has no room for, such as all
pages of a long prompt, are written by a program of their own before it.

The last slot is the dump slot: padding rows and unused changes have it, and write zeros to it.
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.sampling.sampler_inputs import PARAMETERS
from engine.scheduling.sequence import Sequence
from engine.speculation.history import History, new_history

Packed = TypeVar("Packed", Array, NDArray[np.int32])

SLOT, START, FIRST_PARAMETER = 0, 1, 2
COLUMNS = FIRST_PARAMETER + len(PARAMETERS)
"""Of an admission: its slot, the tokens of its prefix hit, and its sampling parameters."""
ADMISSION = np.dtype([("slot", np.int32), ("start", np.int32), *PARAMETERS.items()])
"""What the columns stand for, bit by bit."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Arrays by slot. Steps take them donated and return them."""

    num_tokens: Array
    """i32[slots] tokens whose keys and values are in pages: the position of the next one."""
    page_tables: Array
    """i32[groups * slots, pages_per_seq], a table for each group of layers, one group after the
    other. Behind a window, and where the slot's sequence has no pages yet, it is a predecessor's:
    no kernel reads them."""
    parameters: Array
    """i32[len(PARAMETERS), slots], bit by bit."""

    def after(self, writes: "SlotWrites", packed: Array) -> "SlotState":
        """The state after the changes i32[writes.size] that ``SlotWrites.pack`` has written."""
        admitted, places, pages = writes.split(packed)
        slots = admitted[:, SLOT]
        table, index = jnp.divmod(places, np.int32(self.page_tables.shape[1]))
        return SlotState(
            num_tokens=write(self.num_tokens.at[slots], admitted[:, START]),
            page_tables=write(self.page_tables.at[table, index], pages),
            parameters=write(self.parameters.at[:, slots], admitted[:, FIRST_PARAMETER:].T),
        )

    def tables_of(self, slots: Array) -> Array:
        """i32[rows] slots -> i32[groups, rows, pages_per_seq]"""
        num_slots = self.num_tokens.shape[0]
        firsts = jnp.arange(0, self.page_tables.shape[0], num_slots, dtype=jnp.int32)
        return read(self.page_tables.at[firsts[:, None] + slots[None, :]])


def write(where: Any, values: Array) -> Array:
    """``where`` is an array's ``at`` with indices that are neither negative nor past its end."""
    written: Array = where.set(values, mode="promise_in_bounds", wrap_negative_indices=False)
    return written


def read(where: Any) -> Array:
    """The values there, as in ``write``."""
    values: Array = where.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return values


@dataclass(frozen=True)
class SlotShapes:
    """Sizes of the state."""

    max_num_seqs: int
    num_groups: int
    pages_per_seq: int
    max_model_len: int = 0
    num_drafts: int = 0
    """The most that a row has; with any, the history of all tokens is beside the state."""
    num_earlier: int = 0
    """Tokens of earlier texts that the history has room for beside those of a slot's sequence."""

    @property
    def num_slots(self) -> int:
        """Slots of sequences, and the dump slot."""
        return self.max_num_seqs + 1

    @property
    def dump_slot(self) -> int:
        """The last slot, which no sequence has."""
        return self.max_num_seqs

    def place(self, group: int, slot: int) -> int:
        """The index of a page table's first entry among those of all page tables."""
        return (group * self.num_slots + slot) * self.pages_per_seq

    def new_state(self) -> SlotState:
        """The state without sequences, on the default device."""
        return SlotState(
            num_tokens=jnp.zeros(self.num_slots, jnp.int32),
            page_tables=jnp.zeros((self.num_groups * self.num_slots, self.pages_per_seq), jnp.int32),
            parameters=jnp.zeros((len(PARAMETERS), self.num_slots), jnp.int32),
        )

    def new_fed(self) -> Array | History:
        """What decoding rows are fed (StepLayout.unpack), before the first step; the samplers write
        it."""
        if not self.num_drafts:
            return jnp.zeros(self.num_slots, jnp.int32)
        return new_history(self.num_slots, self.max_model_len, self.num_drafts, self.num_earlier)


@dataclass(frozen=True)
class SlotChanges:
    """Changes of the state, on the host."""

    admitted: NDArray[np.int32]
    """i32[n, COLUMNS]"""
    places: list[int]
    """Indices of page table entries, counted as ``SlotShapes.place`` does."""
    pages: list[int]
    """The page of each."""


@dataclass(frozen=True)
class SlotWrites:
    """Room for so many changes in a packed array."""

    admissions: int
    entries: int
    """Of page tables."""

    @cached_property
    def size(self) -> int:
        """Entries of the packed array."""
        return self.admissions * COLUMNS + 2 * self.entries

    def split(self, packed: Packed) -> tuple[Packed, Packed, Packed]:
        """[size] -> admissions [admissions, COLUMNS], places [entries] and pages [entries]."""
        end = self.admissions * COLUMNS
        return (
            packed[:end].reshape(self.admissions, COLUMNS),
            packed[end : end + self.entries],
            packed[end + self.entries :],
        )

    def hold(self, changes: SlotChanges) -> bool:
        """Whether these changes fit."""
        return len(changes.admitted) <= self.admissions and len(changes.places) <= self.entries

    def blank(self, shapes: SlotShapes) -> NDArray[np.int32]:
        """i32[size] without changes: all that it writes is the dump slot's."""
        blank = np.zeros(self.size, np.int32)
        admitted, places, _ = self.split(blank)
        admitted[:, SLOT], places[:] = shapes.dump_slot, shapes.place(0, shapes.dump_slot)
        return blank

    def pack(self, changes: SlotChanges, packed: NDArray[np.int32]) -> None:
        """Write changes that fit into a blank i32[size]."""
        admitted, places, pages = self.split(packed)
        admitted[: len(changes.admitted)] = changes.admitted
        places[: len(changes.places)] = changes.places
        pages[: len(changes.pages)] = changes.pages

    def pack_all(self, changes: SlotChanges, shapes: SlotShapes) -> Iterator[NDArray[np.int32]]:
        """i32[size] arrays that have all of the changes."""
        admissions, entries = self.admissions, self.entries
        count = max(-(-len(changes.admitted) // admissions), -(-len(changes.places) // entries))
        for part in range(count):
            mine = slice(part * entries, (part + 1) * entries)
            admitted = changes.admitted[part * admissions : (part + 1) * admissions]
            packed = self.blank(shapes)
            self.pack(SlotChanges(admitted, changes.places[mine], changes.pages[mine]), packed)
            yield packed


SEPARATE = SlotWrites(admissions=64, entries=2048)
"""Of the program that writes what a step has no room for."""


def admissions(sequences: ListOf[Sequence], starts: ListOf[int], needs: ListOf[int]) -> NDArray[np.int32]:
    """i32[n, COLUMNS] of sequences that got a slot and have ``starts`` tokens in pages."""
    rows = [
        (sequence.slot, start, *_parameters(sequence, need))
        for sequence, start, need in zip(sequences, starts, needs, strict=True)
    ]
    return np.array(rows, ADMISSION).view(np.int32).reshape(len(rows), COLUMNS)


def _parameters(sequence: Sequence, needs: int) -> tuple[float, ...]:
    """In the order of PARAMETERS."""
    params = sequence.params
    return params.temperature, max(params.top_k, 0), params.top_p, params.min_p, sequence.seed, needs


NO_ADMISSIONS = admissions([], [], [])
