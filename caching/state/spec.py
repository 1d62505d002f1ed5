"""The arrays of recurrent states, of one layer or of a device's pool, before memory is allocated."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class StateArray(NamedTuple):
    """One array of a layer's state, in one slot."""

    shape: tuple[int, ...]
    dtype: np.dtype | None = None
    """None is the dtype of activations."""
    whole: int = 0
    """Further entries of the first axis. Devices split the others, and each has all of these."""

    def part(self, devices: int) -> tuple[int, ...]:
        """The shape of one device's part."""
        first, *rest = self.shape
        assert first % devices == 0, f"{devices} devices do not divide {self.shape}"
        return (first // devices + self.whole, *rest)

    def repeated(self, count: int) -> "StateArray":
        """So many of a flat one."""
        (first,) = self.shape
        return StateArray((count * first,), self.dtype, count * self.whole)


@dataclass(frozen=True)
class StatePool:
    """One device's slots; slot 0 is the sink and has no owner."""

    num_layers: int
    """Layers of which a slot has the state."""
    num_slots: int
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Of one layer in one slot, shapes and dtypes."""
    stacked: bool = False
    """Whether all layers share each array, one after the other, or each has its own."""

    @classmethod
    def of_one_slot(
        cls, arrays: tuple[StateArray, ...], num_layers: int, devices: int, activations: np.dtype, *, stacked: bool
    ) -> "StatePool":
        """One device's part of one slot."""
        each = tuple((array.part(devices), array.dtype or activations) for array in arrays)
        return cls(num_layers, 1, each, stacked)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all its layers."""
        return self.num_layers * sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.bytes_per_slot
