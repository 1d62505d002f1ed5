"""What a block's mixer is: attention, or another layer that lets tokens see the earlier ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from jax import Array

from caching.state.spec import StateArray
from engine.models.rope_spec import RopeSpec
from engine.models.weights.factory import ParameterFactory

if TYPE_CHECKING:
    from engine.models.partition import Partition
    from engine.models.step_context import LayerCache, Place, StepContext


@dataclass(frozen=True)
class KeysAndValues:
    """A layer caches keys and values of each token, in pages."""

    kv_heads: int
    head_dim: int
    reach: int | None
    """The most tokens that a later one sees, itself included; None is all."""
    vectors: ClassVar[int] = 2
    """Of a token for each kv head."""


@dataclass(frozen=True)
class Latents:
    """A layer caches one latent of each token for all its heads, in pages."""

    head_dim: int
    """Numbers of a latent, a rotated key included."""
    kv_heads: ClassVar[int] = 1
    reach: ClassVar[None] = None
    vectors: ClassVar[int] = 1


@dataclass(frozen=True)
class OfLayer:
    """A layer caches nothing, and reads the cache of another."""

    layer: int
    reach: int | None
    """As in KeysAndValues."""


@dataclass(frozen=True)
class OfModel:
    """A layer of a draft head caches nothing, and reads the cache of a layer of the model that it
    drafts for."""

    layer: int
    reach: int | None
    """As in KeysAndValues."""


@dataclass(frozen=True)
class State:
    """A layer keeps arrays of equal size for each sequence, whatever its length, in a slot."""

    arrays: tuple[StateArray, ...]
    """The window of the convolution, and then what the recurrence has, if there is one."""
    each_token: tuple[StateArray, ...] = ()
    """Flat: what of a token a slot has behind its state, where rows may have drafts
    (caching/state/table.py). What the convolution reads, and then what the recurrence does."""

    def slot(self, num_undone: int) -> tuple[StateArray, ...]:
        """The arrays of a slot with up to so many tokens behind its state: beside ``arrays`` the
        number of tokens in that, if there are any."""
        if not num_undone:
            return self.arrays
        base = StateArray((0,), np.dtype(np.int32), whole=1)
        return *self.arrays, base, *(array.repeated(num_undone) for array in self.each_token)


InPages = KeysAndValues | Latents
"""What a page has of a layer."""
Cached = InPages | OfLayer | OfModel | State
"""What a layer caches."""


class Mixer(Protocol):
    """The module of a mixer, an ``nnx.Module``."""

    def __call__(
        self, x: Array, cache: "LayerCache", place: "Place", step: "StepContext"
    ) -> "tuple[LayerCache, Array]":
        """f[..., hidden] -> the updated cache and f[..., hidden], all-reduced over devices.

        ``cache`` has what the layer caches, at ``place``: a page array, or a tuple of the arrays of
        a State, whose slots ``step.states.of_layer(place.layer)`` says.
        """


class MixerSpec(Protocol):
    """One kind of mixer, in the file of its module. Hashable."""

    @property
    def cached(self) -> Cached:
        """What a layer caches."""

    @property
    def rotated(self) -> tuple[RopeSpec, int] | None:
        """Its rope and the dimensions of a head, if positions enter it so."""

    @property
    def extras(self) -> str | None:
        """What it asks of an attention kernel that not every kernel has, in words."""

    def flops(self, tokens: int, devices: int) -> int:
        """Operations of one token that sees so many, beside those of weights, on each device."""

    def indivisible(self, devices: int) -> str | None:
        """What so many devices cannot split evenly, in words, if there is such."""

    def scratch(self, head_dim: int, devices: int) -> int:
        """An upper estimate of a token's float32 numbers on each of the devices, in a step.

        ``head_dim`` is that of pages.
        """

    def build(self, partition: "Partition", make: ParameterFactory) -> Mixer:
        """Its module, with parameters from ``make``."""
