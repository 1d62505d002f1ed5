"""What layers with a recurrent state share: the slots of a step, and their small parameters."""

from typing import Any

import numpy as np
from jax import Array
from jax import numpy as jnp
from numpy.typing import NDArray

from caching.state.spec import StateArray
from caching.state.table import StateTable
from engine.models.step_context import LayerCache, Place, StepContext

FLOAT32 = np.dtype(np.float32)


def slots_of(
    x: Array, cache: LayerCache, place: Place, step: StepContext, arrays: tuple[StateArray, ...], devices: int
) -> tuple[StateTable, tuple[Array, ...]]:
    """A layer's slots in a step, and its arrays of states.

    Over whole rows ``x`` f[batch, length, hidden], which begin with zeros, both are made here.
    """
    if isinstance(cache, tuple) and step.states is not None:
        return step.states.of_layer(place.layer), cache
    batch, length, _ = x.shape
    made = [jnp.zeros((batch + 1, *array.part(devices)), array.dtype or x.dtype) for array in arrays]
    return StateTable.of_whole_rows(batch, length), tuple(made)


def minus_exp(x: NDArray[Any]) -> NDArray[Any]:
    """From a checkpoint's ``A_log`` to the rate at which a state changes, which is below 0."""
    rate: NDArray[Any] = -np.exp(x)
    return rate
