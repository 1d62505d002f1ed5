"""A causal convolution of each channel by itself, over the rows of a step.

A row's state is its window: the last ``taps - 1`` tokens before the step, zeros where there are
fewer. Sums are in the same order wherever a step begins, so they have the same bits.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from caching.state.table import StateTable


def convolve(
    table: StateTable, windows: tuple[Array, ...], x: Array, weights: Array, bias: Array | None
) -> tuple[tuple[Array, ...], Array]:
    """Windows f[slots, (taps - 1) * channels] after the step, and f32[T, channels].

    ``x`` is f[T, channels], ``weights`` f32[taps, channels], of which the last is for the token
    itself, and ``bias`` f32[channels]. Where rows may have drafts, the second of ``windows`` is
    f[slots, n * channels] of the tokens behind the first.
    """
    (tokens, channels), taps = x.shape, weights.shape[0]
    rows = jnp.arange(table.slots.shape[0], dtype=jnp.int32)
    lengths = table.lengths
    before = table.read(windows[0], rows).reshape(-1, taps - 1, channels).astype(x.dtype)
    for behind in windows[1:]:
        both = jnp.concatenate([before, table.read(behind, rows).reshape(len(rows), -1, channels)], axis=1)
        skipped = jnp.clip(table.behind, 0, both.shape[1] - taps + 1)
        places = skipped[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)[None]
        before = jnp.take_along_axis(both, places[..., None], axis=1)
    whole = _convolved(jnp.pad(x, ((taps - 1, 0), (0, 0))), weights, bias)
    # The first tokens of each row also see its window.
    offsets = jnp.arange(taps - 1, dtype=jnp.int32)[None]
    places = table.cu_q_lens[:-1, None] + offsets
    firsts = x[jnp.minimum(places, tokens - 1)]
    heads = _convolved(jnp.concatenate([before, firsts], axis=1), weights, bias)
    is_of_row = offsets < lengths[:, None]
    outside = tokens + jnp.arange(places.size, dtype=jnp.int32).reshape(places.shape)
    places = jnp.where(is_of_row, places, outside)
    whole = whole.at[places].set(heads, mode="drop", unique_indices=True)
    last, written = _last(table, before, x), list[Array]()
    for behind in windows[1:]:
        last = jnp.where(table.drafted[:, None], before.reshape(last.shape), last)
        places = table.cu_q_lens[:-1, None] + jnp.arange(behind.shape[1] // channels, dtype=jnp.int32)[None]
        own = x[jnp.minimum(places, tokens - 1)].reshape(len(rows), -1)
        written.append(table.write(behind, rows, own, table.drafted & (lengths > 0)))
    return (table.write(windows[0], rows, last, lengths > 0), *written), whole


def _convolved(x: Array, weights: Array, bias: Array | None) -> Array:
    """f[..., taps - 1 + n, channels] -> f32[..., n, channels]."""
    taps, lead = weights.shape[0], (1,) * (x.ndim - 1)
    count = x.shape[-2] - taps + 1
    parts = [x[..., tap : tap + count, :].astype(jnp.float32) * weights[tap].reshape(*lead, -1) for tap in range(taps)]
    total = sum(parts[1:], parts[0])
    return total if bias is None else total + bias.reshape(*lead, -1)


def _last(table: StateTable, before: Array, x: Array) -> Array:
    """The windows after the step, f[rows, (taps - 1) * channels]; ``before`` are those before it."""
    count = before.shape[1]
    places = table.lengths[:, None] - np.int32(count) + jnp.arange(count, dtype=jnp.int32)[None]
    new = x[jnp.clip(table.cu_q_lens[:-1, None] + places, 0, x.shape[0] - 1)]
    old = jnp.take_along_axis(before, jnp.clip(places + count, 0, count - 1)[..., None], axis=1)
    return jnp.where((places >= 0)[..., None], new, old).reshape(before.shape[0], -1)
