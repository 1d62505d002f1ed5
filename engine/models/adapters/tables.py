"""The embedding and the head, and where an adapter's factors are beside them.

Both are declared as kernels: the head from hidden to vocabulary, the embedding from vocabulary to
hidden, of which PEFT's factors have the shapes. So a part of the vocabulary is cut and filled up as
it is for the table.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import TP
from engine.models.adapters.adapted_table import AdaptedTable, GroupedRows, MaskedRows
from engine.models.adapters.kernels import AdaptedKernel, Factors, whole_rank
from engine.models.weights import panels
from engine.models.weights.parameters import Parameter, Role, TensorRule
from engine.models.weights.sources.tensor_source import HEAD
from engine.models.weights.weight_format import Layout, Leaf, table_width


@dataclass(frozen=True)
class AdaptedHead(AdaptedKernel):
    """A table in its use as head. ``entry`` has the path of the table, and ``head_of`` it."""

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """See AdaptedWeight."""
        table = value if isinstance(value, AdaptedTable) else AdaptedTable(value)
        return replace(table, head=self.factors(arrays))


@dataclass(frozen=True)
class AdaptedEmbedding(AdaptedKernel):
    """A table in its use as embedding; ``entry`` has the path of the table, and ``embedding_of`` it."""

    def block(self, layer: int | None, a: Factors, b: Factors) -> list[NDArray[Any]]:
        """One slot: f[vocab, rank] and f[rank, hidden], or ``b`` in panels."""
        whole = replace(self, layout=Layout.MATRIX)
        (stacked, high) = AdaptedKernel.block(whole, layer, a, b)
        low = stacked[0].T
        if self.layout is not Layout.PANELS:
            return [low, high]
        missing = whole_rank(self.rank) - self.rank
        return [np.pad(low, [(0, 0), (0, missing)]), panels.in_panels(np.pad(high.T, [(0, 0), (0, missing)]))]

    def leaves(self, slots: int) -> list[Leaf]:
        """f[vocab, slots * rank] in whole tiles, as tables are, and f[slots * rank, hidden]; or by
        slot, ``b`` in panels."""
        vocabulary, hidden = self.parameter.shape
        if self.layout is Layout.PANELS:
            rank = whole_rank(self.rank)
            shapes = [(vocabulary, rank), panels.panels_shape(hidden, rank)]
            return [Leaf((slots, *shape), self.dtype) for shape in shapes]
        columns = slots * self.rank
        width = columns if slots == 1 else table_width(columns, self.layout)
        return [Leaf((vocabulary, width), self.dtype, (TP, None)), Leaf((columns, hidden), self.dtype, (None, None))]

    @property
    def slot_axes(self) -> list[int]:
        """See AdaptedWeight."""
        return [-3, -4] if self.layout is Layout.PANELS else [-1, -2]

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """See AdaptedWeight."""
        table = value if isinstance(value, AdaptedTable) else AdaptedTable(value)
        a, b = arrays
        return replace(table, embedding=(GroupedRows if self.layout is Layout.PANELS else MaskedRows)(a, b))


def embedding_of(table: Parameter) -> Parameter:
    """A table as the kernel [vocab, hidden] of an embedding."""
    return replace(table, role=Role.KERNEL, inputs=1, rule=TensorRule(table.rule.tensors[:1]))


def head_of(table: Parameter) -> Parameter:
    """A table as the kernel [hidden, vocab] of a head."""
    vocabulary, hidden = table.axes
    own = table.rule.tensors[:1] if table.name == "lm_head" else (HEAD,)
    return replace(table, role=Role.KERNEL, inputs=1, axes=(hidden, vocabulary), rule=TensorRule(own))
