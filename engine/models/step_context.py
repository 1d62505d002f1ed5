"""What all layers of one step share: it goes through the decoder as one value."""

from dataclasses import dataclass
from typing import Protocol

import jax
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.models.rope import Rotation

LayerCache = Array | None
Place = Array | None
"""i32[] which of the layers that share a cache one is; None where a layer has a cache of its own."""


class StepAttention(Protocol):
    """A step's attention, a pytree: over pages in service, over whole rows in training."""

    @property
    def fuses_rotation(self) -> bool:
        """Whether it rotates q and k itself."""

    def __call__(
        self, spec: AttentionSpec, cache: LayerCache, place: Place, inputs: AttentionInputs
    ) -> tuple[LayerCache, Array]:
        """One layer's cache as it is now, and f[..., heads, head_dim]; ``inputs`` have the decoder's leading axes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """Arrays by token have the leading axes of the step's token ids."""

    rotation: Rotation
    attention: StepAttention
