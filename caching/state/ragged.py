"""Runs a recurrence over the rows of a step, whatever their lengths.

Rows of one token, which are all that decode, are computed ``BLOCK`` at a time, and the others
``CHUNK`` tokens at a time. How often is known on the device alone, so a step's shape does not
depend on it. Only the states of a block or of one row are outside of their slots at a time: a
state may have megabytes.
"""

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
        """CHUNK tokens of a sequence: f32[...] and inputs [CHUNK, ...] -> f32[...], f32[CHUNK, ...]."""


def scan_rows(recurrence: Recurrence[Inputs], table: StateTable, states: Array, inputs: Inputs) -> tuple[Array, Array]:
    """States f32[slots, ...] with those after each row, and outputs f32[T, ...].

    ``inputs`` are [T, ...]. Outputs of padding tokens are finite but undefined.
    """
    tokens = jax.tree.leaves(inputs)[0].shape[0]
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK)] + [(0, 0)] * (x.ndim - 1)), inputs)
    state = jax.ShapeDtypeStruct(states.shape[1:], states.dtype)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((CHUNK, *x.shape[1:]), x.dtype), inputs)
    output = jax.eval_shape(recurrence.chunk, state, one)[1]
    outputs = jnp.zeros((tokens + CHUNK, *output.shape[1:]), output.dtype)
    states, outputs = _scan_chunks(recurrence, table, (states, outputs), padded)
    states, outputs = _scan_single_tokens(recurrence, table, (states, outputs), inputs)
    return states, outputs[:tokens]


def _scan_chunks(
    recurrence: Recurrence[Inputs], table: StateTable, written: tuple[Array, Array], inputs: Inputs
) -> tuple[Array, Array]:
    """The states and outputs, with those of rows of more than one token.

    Behind a row's last token a chunk has outputs that the next row's overwrite.
    """
    lengths = table.lengths
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
            cut = jax.lax.dynamic_slice_in_dim(x, start, CHUNK)
            is_of_row = (offsets < left).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(is_of_row, cut, np.array(0, x.dtype))

        state, new = recurrence.chunk(state, jax.tree.map(part, inputs))
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, new, start, axis=0)
        return table.write(states, row[None], state[None], jnp.ones(1, jnp.bool_)), outputs, state

    first = jnp.zeros(written[0].shape[1:], written[0].dtype)
    states, outputs, _ = jax.lax.fori_loop(np.int32(0), ends[-1], chunk, (*written, first))
    return states, outputs


def _scan_single_tokens(
    recurrence: Recurrence[Inputs], table: StateTable, written: tuple[Array, Array], inputs: Inputs
) -> tuple[Array, Array]:
    """The states and outputs, with those of rows of one token, which are mostly the first."""
    lengths = table.lengths
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
