"""Adapters as a client loads them. This module knows no jax."""

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


class AdapterError(ValueError):
    """An adapter cannot be served: the fault of whoever loads it. The message says why."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter in host memory, in the layout of a device's slot."""

    uid: int
    """Above 0 and never used twice: an adapter that is read again is another one."""
    origin: str
    """The directory that it was read from."""
    rank: int
    """The largest of its modules' ranks."""
    arrays: tuple[NDArray[Any], ...] = field(repr=False)
    """What is written to a slot (engine/adapters/slot_arrays.py), over all devices together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, which are those of a slot."""
        return sum(array.nbytes for array in self.arrays)
