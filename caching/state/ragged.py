"""Runs a recurrence over the rows of a step, whatever their lengths.

Rows of one token, which are all that decode, are computed ``BLOCK`` at a time, and the others
``CHUNK`` tokens at a time. How often is known on the device alone, so a step's shape does not
depend on it. Only the states of a block or of one row are outside of their slots at a time: a
state may have megabytes.

Rows that go back (``StateTable.goes_back``) are computed one after the other, too, each at once: first
the tokens behind the state in its slot, and then its own.
"""

import math
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.state.table import StateTable

CHUNK = 64
BLOCK = 8

Inputs = TypeVar("Inputs", contravariant=True)
"""A pytree of arrays with the same first axis. Tokens of zeros leave a state as it is."""


class Recurrence(Protocol[Inputs]):
    """From a state and tokens to the state after them, and an output f32[...] for each token."""

    def step(self, states: Array, inputs: Inputs) -> tuple[Array, Array]:
        """One token each of n sequences: f32[n, ...] and inputs [n, ...] -> f32[n, ...] twice."""

    def chunk(self, state: Array, inputs: Inputs) -> tuple[Array, Array]:
        """Some tokens of a sequence, a power of two: f32[...] and inputs [n, ...] -> f32[...], f32[n, ...]."""


def scan_rows(
    recurrence: Recurrence[Inputs], table: StateTable, stored: tuple[Array, ...], inputs: Inputs
) -> tuple[tuple[Array, ...], Array]:
    """What is stored, with the states after each row, and outputs f32[T, ...].

    ``inputs`` are [T, ...]. Outputs of padding tokens are finite but undefined. ``stored`` are
    states f32[slots, ...], and where rows may have drafts, by array of ``inputs``, those
    [slots, n * ...] of the n tokens behind the state.
    """
    states, *behind = stored
    tokens = jax.tree.leaves(inputs)[0].shape[0]
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK)] + [(0, 0)] * (x.ndim - 1)), inputs)
    state = jax.ShapeDtypeStruct(states.shape[1:], states.dtype)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((CHUNK, *x.shape[1:]), x.dtype), inputs)
    output = jax.eval_shape(recurrence.chunk, state, one)[1]
    outputs = jnp.zeros((tokens + CHUNK, *output.shape[1:]), output.dtype)
    lengths = table.lengths
    if behind:
        states, behind, outputs = _scan_going_back(recurrence, table, (states, behind, outputs), padded)
        goes_back = table.goes_back
        done = goes_back & (lengths <= _size(behind, inputs))
        table, lengths = table.from_slots(goes_back), jnp.where(done, 0, lengths)
    states, outputs = _scan_chunks(recurrence, table, lengths, (states, outputs), padded)
    states, outputs = _scan_single_tokens(recurrence, table, lengths, (states, outputs), inputs)
    return (states, *behind), outputs[:tokens]


def _size(behind: list[Array], inputs: Inputs) -> int:
    """Tokens of a row that goes back and is computed at once: a power of two."""
    numbers = math.prod(jax.tree.leaves(inputs)[0].shape[1:])
    tokens: int = behind[0].shape[1] // numbers
    return 1 << (tokens - 1).bit_length()


def _scan_going_back(
    recurrence: Recurrence[Inputs], table: StateTable, written: tuple[Array, list[Array], Array], inputs: Inputs
) -> tuple[Array, list[Array], Array]:
    """The states, what is behind them and the outputs, with those of rows that go back.

    A row that is too long for that is left before its own tokens.
    """
    lengths, goes_back = table.lengths, table.goes_back
    size, (leaves, structure) = _size(written[1], inputs), jax.tree.flatten(inputs)
    order = jnp.argsort(~goes_back, stable=True).astype(jnp.int32)
    offsets = jnp.arange(size, dtype=jnp.int32)

    def before(stored: Array, like: Array, row: Array) -> Array:
        kept = table.read(stored, row).reshape(-1, *like.shape[1:])
        kept = jnp.pad(kept, [(0, size - kept.shape[0])] + [(0, 0)] * (kept.ndim - 1))
        return _only(kept, offsets < table.behind[row])

    def one(number: Array, carry: tuple[Array, list[Array], Array]) -> tuple[Array, list[Array], Array]:
        states, behind, outputs = carry
        row = order[number][None]
        start, length, drafted = table.cu_q_lens[row[0]], lengths[row[0]], table.drafted[row]
        is_own = (offsets < length) & (length <= size)
        earlier = [before(stored, like, row) for stored, like in zip(behind, leaves, strict=True)]
        own = [_only(jax.lax.dynamic_slice_in_dim(x, start, size), is_own) for x in leaves]
        settled, _ = recurrence.chunk(table.read(states, row)[0], jax.tree.unflatten(structure, earlier))
        after, found = recurrence.chunk(settled, jax.tree.unflatten(structure, own))
        new = jnp.where(drafted[0] | (length > size), settled, after)
        behind = [
            table.write(stored, row, x.reshape(1, -1)[:, : stored.shape[1]], drafted)
            for stored, x in zip(behind, own, strict=True)
        ]
        found = jnp.where(_wide(is_own, found), found, jax.lax.dynamic_slice_in_dim(outputs, start, size))
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, found, start, axis=0)
        return table.write(states, row, new[None], jnp.ones(1, jnp.bool_)), behind, outputs

    count = jnp.sum(goes_back, dtype=jnp.int32)
    found: tuple[Array, list[Array], Array] = jax.lax.fori_loop(np.int32(0), count, one, written)
    return found


def _only(x: Array, chosen: Array) -> Array:
    """[n, ...] with zeros where bool[n] is false."""
    return jnp.where(_wide(chosen, x), x, np.array(0, x.dtype))


def _wide(chosen: Array, x: Array) -> Array:
    return chosen.reshape(-1, *[1] * (x.ndim - 1))


def _scan_chunks(
    recurrence: Recurrence[Inputs], table: StateTable, lengths: Array, written: tuple[Array, Array], inputs: Inputs
) -> tuple[Array, Array]:
    """The states and outputs, with those of rows of more than one token, of i32[rows] ``lengths``."""
    counts = jnp.where(lengths > 1, (lengths + np.int32(CHUNK - 1)) // np.int32(CHUNK), 0)
    ends = jnp.cumsum(counts)
    offsets = jnp.arange(CHUNK, dtype=jnp.int32)

    def chunk(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, outputs, state = carry
        row = jnp.sum(ends <= number, dtype=jnp.int32)
        done = (number - (ends[row] - counts[row])) * np.int32(CHUNK)
        start, left = table.cu_q_lens[row] + done, lengths[row] - done
        state = jnp.where(done == 0, table.read(states, row[None])[0], state)

        def part(x: Array) -> Array:
            return _only(jax.lax.dynamic_slice_in_dim(x, start, CHUNK), offsets < left)

        state, new = recurrence.chunk(state, jax.tree.map(part, inputs))
        new = jnp.where(_wide(offsets < left, new), new, jax.lax.dynamic_slice_in_dim(outputs, start, CHUNK))
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, new, start, axis=0)
        return table.write(states, row[None], state[None], jnp.ones(1, jnp.bool_)), outputs, state

    first = jnp.zeros(written[0].shape[1:], written[0].dtype)
    states, outputs, _ = jax.lax.fori_loop(np.int32(0), ends[-1], chunk, (*written, first))
    return states, outputs


def _scan_single_tokens(
    recurrence: Recurrence[Inputs], table: StateTable, lengths: Array, written: tuple[Array, Array], inputs: Inputs
) -> tuple[Array, Array]:
    """The states and outputs, with those of rows of one token, which are mostly the first."""
    count = lengths.shape[0]
    size = min(BLOCK, count)
    last = jnp.max(jnp.where(lengths == 1, jnp.arange(1, count + 1, dtype=jnp.int32), 0))

    def block(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        states, outputs = carry
        every = number * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
        rows = jnp.minimum(every, count - 1)
        is_single = (every < count) & (lengths[rows] == 1)
        tokens = table.cu_q_lens[rows]
        new, found = recurrence.step(table.read(states, rows), jax.tree.map(lambda x: x[tokens], inputs))
        outside = outputs.shape[0] + jnp.arange(size, dtype=jnp.int32)
        tokens = jnp.where(is_single, tokens, outside)
        outputs = outputs.at[tokens].set(found, mode="drop", unique_indices=True)
        return table.write(states, rows, new, is_single), outputs

    blocks = (last + np.int32(size - 1)) // np.int32(size)
    states, outputs = jax.lax.fori_loop(np.int32(0), blocks, block, written)
    return states, outputs
