"""A table of the vocabulary with adapters in slots beside it: of the embedding, of the head, or of both.

To PEFT embedding and head are two modules, each with an adapter of its own, even where one table
serves as both. A token's row gets ``a[token] . b``, a head's logits ``(x . a) . b``. The two forms
are those of engine/models/adapters/adapted.py.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.models.adapters.adapted import AdapterRows, Apart, Masked, own_columns
from engine.models.weights import panels
from engine.models.weights.forms import Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskedRows:
    """The factors of an embedding, those of all slots side by side."""

    a: Array
    """f[vocab, columns]: slots * rank, and zeros up to whole tiles."""
    b: Array
    """f[slots * rank, hidden]"""

    def delta(self, places: Array, rows: AdapterRows) -> Array:
        """i32[T] -> f32[T, hidden], zeros for a row without an adapter."""
        columns = self.b.shape[0]
        low = jnp.take(self.a, places, axis=0)[:, :columns]
        masked = jnp.where(own_columns(rows.slots, columns, rows.num_slots), low, np.array(0, low.dtype))
        product: Array = jnp.matmul(masked, self.b, preferred_element_type=np.float32)
        return product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedRows:
    """As MaskedRows, with each slot's ``b`` in panels."""

    a: Array
    """f[slots, vocab, rank], the rank rounded up to whole panels."""
    b: Array
    """f[slots, panels of hidden, rank, width]"""

    def delta(self, places: Array, rows: AdapterRows) -> Array:
        """i32[T] -> f32[T, hidden], zeros for a row without an adapter."""
        slots, count, _, width = self.b.shape
        order = jnp.argsort(jnp.where(rows.slots < 0, np.int32(slots), rows.slots))
        sizes = jnp.sum(rows.slots[None, :] == jnp.arange(slots)[:, None], axis=1, dtype=jnp.int32)
        low = self.a[jnp.maximum(rows.slots, 0), places][order]
        product = panels.grouped_product(low, self.b, sizes, count * width, jnp.zeros((slots, 0), np.float32))
        return product[jnp.argsort(order)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedTable:
    """A table [vocab, hidden] whose slots have adapters of what it serves as."""

    base: Weight
    embedding: MaskedRows | GroupedRows | None = None
    head: Masked | Apart | None = None

    @property
    def out(self) -> tuple[int, ...]:
        """As in Dense."""
        return self.base.out

    def rows(self, places: Array, hidden: int, rows: AdapterRows) -> Array:
        """Rows f[T, hidden] of the table at i32[T] indices, each with its adapter."""
        found = self.base.rows(places)[..., :hidden]
        if self.embedding is None:
            return found
        delta = self.embedding.delta(places, rows)[:, :hidden]
        adapted: Array = (found.astype(np.float32) + delta).astype(found.dtype)
        return adapted

    def logits(self, hidden: Array, rows: AdapterRows) -> Array:
        """f[R, hidden] -> f32[R, vocab], each row with its adapter."""
        found = self.base.logits(hidden)
        return found if self.head is None else self.head.added(found, hidden, rows, self.out)
