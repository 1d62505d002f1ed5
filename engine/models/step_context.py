"""The arrays and the attention that all layers of a step share."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec, LatentInputs, LatentSpec
from caching.state.table import StateTable
from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.row_operations import XLA_ROWS, RowOperations
from engine.models.rope import Rotation

LayerCache = Array | tuple[Array, ...] | None
"""Pages, or the arrays of a state."""


class Place(NamedTuple):
    """Where a layer finds its keys and values, or its state."""

    group: Array | int
    """Its page table; 0 for a state."""
    layer: Array | None
    """i32[] index among the layers that share its array; None if it has its own."""


class StepAttention(Protocol):
    """A step's attention, a pytree: over pages in service, over whole rows in training."""

    @property
    def fuses_rotation(self) -> bool:
        """Whether it rotates q and k itself."""

    def __call__(
        self,
        spec: AttentionSpec | LatentSpec,
        cache: LayerCache,
        place: Place,
        inputs: AttentionInputs | LatentInputs,
    ) -> tuple[LayerCache, Array]:
        """One layer's updated cache, and f[..., heads, head_dim] with the axes of ``inputs``.

        ``inputs`` are those of the spec.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """Arrays by token have the leading axes of the step's token ids."""

    rotations: tuple[Rotation, ...]
    """One for each of the model's ``ropes``."""
    attention: StepAttention
    num_tokens: Array | None = None
    """i32[] how many of the tokens are not padding, which comes last; None is all."""
    states: StateTable | None = None
    """The slots of the step's rows, in a model that has states; None over whole rows, which begin
    with zeros."""
    adapters: AdapterRows | None = None
    """The adapters of the tokens, where some have one; None if the kernels have none."""
    positions: Array | None = None
    """i32[...] those of the tokens; only a model with a table of positions reads them."""
    rows: RowOperations = field(default=XLA_ROWS, metadata={"static": True})
    """What computes between products."""
