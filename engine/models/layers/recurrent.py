"""What layers with a recurrent state share: the slots of a step, and their small parameters."""

from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax import numpy as jnp
from numpy.typing import NDArray

from caching.state.table import StateTable
from engine.models.layers.mixer import State
from engine.models.step_context import LayerCache, Place, StepContext

FLOAT32 = np.dtype(np.float32)


class LayerSlots(NamedTuple):
    """A layer's slots in a step, and its arrays of states. ``bases`` is one where rows may have
    drafts: then the others have more than one array."""

    table: StateTable
    windows: tuple[Array, ...]
    """Of ``convolve``."""
    stored: tuple[Array, ...]
    """Of ``scan_rows``; none where the convolution is all that sees earlier tokens."""
    bases: tuple[Array, ...] = ()

    @property
    def cache(self) -> tuple[Array, ...]:
        """The arrays, in the order of ``State.slot``."""
        return self.windows[0], *self.stored[:1], *self.bases, *self.windows[1:], *self.stored[1:]


def slots_of(x: Array, cache: LayerCache, place: Place, step: StepContext, state: State, devices: int) -> LayerSlots:
    """A layer's slots in a step, with how many tokens will be in each state.

    Over whole rows ``x`` f[batch, length, hidden], which begin with zeros, they are made here.
    """
    if isinstance(cache, tuple) and step.states is not None:
        count, table = len(state.arrays), step.states.of_layer(place.layer)
        (window, *states), others = cache[:count], cache[count:]
        if not others:
            return LayerSlots(table, (window,), (*states,))
        base, tokens, *behind = others
        table, base = table.after_base(base)
        return LayerSlots(table, (window, tokens), (*states, *behind), (base,))
    batch, length, _ = x.shape
    window, *states = (jnp.zeros((batch + 1, *one.part(devices)), one.dtype or x.dtype) for one in state.arrays)
    return LayerSlots(StateTable.of_whole_rows(batch, length), (window,), (*states,))


def minus_exp(x: NDArray[Any]) -> NDArray[Any]:
    """From a checkpoint's ``A_log`` to the rate at which a state changes, which is below 0."""
    rate: NDArray[Any] = -np.exp(x)
    return rate
