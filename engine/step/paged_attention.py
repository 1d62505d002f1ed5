"""Attention over the pages of a step, by the backend's kernel."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array

from caching.attention.spec import (
    AttentionInputs,
    AttentionSpec,
    CacheView,
    Kernel,
    LatentInputs,
    LatentSpec,
    PageTable,
)
from engine.models.step_context import LayerCache, Place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttention:
    """Attention over the pages of a step; a StepAttention."""

    table: PageTable
    kernel: Kernel = field(metadata={"static": True})
    num_pages: int = field(metadata={"static": True})
    """In each layer."""

    @property
    def fuses_rotation(self) -> bool:
        """Whether the kernel rotates q and k itself."""
        return self.kernel.fuses_rotation

    def __call__(
        self,
        spec: AttentionSpec | LatentSpec,
        cache: LayerCache,
        place: Place,
        inputs: AttentionInputs | LatentInputs,
    ) -> tuple[Array, Array]:
        """See StepAttention."""
        assert isinstance(cache, Array)
        table = self.table.of_layer(place.group, None if place.layer is None else place.layer * self.num_pages)
        attended: tuple[Array, Array] = _attend(self.kernel, spec, CacheView(cache, table), inputs)
        return attended


@partial(jax.jit, static_argnames=("kernel", "spec"))
def _attend(kernel: Any, spec: Any, view: CacheView, inputs: Any) -> tuple[Array, Array]:
    """One layer's attention. It is inlined when compiled, but traced once for equal layers."""
    attended: tuple[Array, Array] = kernel(spec, view, inputs)
    return attended
