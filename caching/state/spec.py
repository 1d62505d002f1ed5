"""The arrays of a layer's recurrent state, before memory is allocated."""

import math
from typing import NamedTuple

import jax
import numpy as np


class StateArray(NamedTuple):
    """One array of a layer's state, in one slot."""

    shape: tuple[int, ...]
    dtype: np.dtype | None = None
    """None is the dtype of activations."""
    whole: int = 0
    """Further entries of the first axis. Devices split the others, and each has all of these."""

    def struct(self, num_slots: int, activations: np.dtype, devices: int) -> jax.ShapeDtypeStruct:
        """One device's part of it in so many slots."""
        first, *rest = self.shape
        assert first % devices == 0, f"{devices} devices do not divide {self.shape}"
        shape = (num_slots, first // devices + self.whole, *rest)
        return jax.ShapeDtypeStruct(shape, activations if self.dtype is None else self.dtype)


def num_bytes(struct: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of this shape."""
    return int(math.prod(struct.shape) * struct.dtype.itemsize)
