"""A recurrent layer that is simple enough to be seen through: a decaying sum of what it is given."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import build_checkpoint
from flax import nnx

from caching.state.spec import StateArray
from engine.models.layers.mixer import State
from engine.models.model_config import read_model_config
from engine.models.spec import ModelSpec

DECAY = np.float32(0.8)


@dataclass(frozen=True)
class DecayingSumSpec:
    """A MixerSpec. Beside the sum there is the number of tokens in it."""

    hidden_size: int
    rotated: None = None
    extras: None = None

    @property
    def cached(self):
        """See MixerSpec."""
        return State((StateArray((self.hidden_size,), np.dtype(np.float32)), StateArray((1,))))

    def flops(self, tokens, devices):
        """See MixerSpec."""
        del tokens, devices
        return 0

    def indivisible(self, devices):
        """See MixerSpec."""
        del devices

    def scratch(self, head_dim, devices):
        """See MixerSpec."""
        del head_dim, devices
        return self.hidden_size

    def build(self, partition, make):
        """See MixerSpec."""
        del partition, make
        return DecayingSum()


class DecayingSum(nnx.Module):
    """f[T, hidden] of a step -> f[T, hidden], one token after the other."""

    def __call__(self, x, cache, place, step):
        table, (sums, counts) = step.states.of_layer(place.layer), cache
        rows = jnp.arange(table.slots.shape[0], dtype=jnp.int32)
        tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
        row_of = jnp.searchsorted(table.cu_q_lens[1:], tokens, side="right").astype(jnp.int32)

        def add(sums, token):
            row, x = token
            new = sums[jnp.minimum(row, len(rows) - 1)] * DECAY + x
            return sums.at[row].set(new, mode="drop"), new

        last, each = jax.lax.scan(add, table.read(sums, rows), (row_of, x.astype(jnp.float32)))
        number = table.read(counts, rows) + table.lengths[:, None].astype(counts.dtype)
        is_written = table.lengths > 0
        cache = table.write(sums, rows, last, is_written), table.write(counts, rows, number, is_written)
        after = table.cu_q_lens[1:][row_of] - tokens - 1
        place = number[jnp.minimum(row_of, len(rows) - 1)] - after[:, None].astype(counts.dtype)
        return cache, (jnp.tanh(each) + jnp.sin(place.astype(jnp.float32))).astype(x.dtype)


def model_of_sums(directory: Path, *, windows: bool) -> ModelSpec:
    """A model of a recurrent layer and one of attention, twice; the first attention may have a window."""
    pattern = {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 8}
    model = read_model_config(build_checkpoint(directory, "gemma3", **pattern))
    full = model.blocks[1]
    recurrent = replace(full, mixer=DecayingSumSpec(model.hidden_size))
    return replace(model, blocks=(recurrent, model.blocks[0] if windows else full, recurrent, full))
