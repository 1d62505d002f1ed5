"""A kernel with adapters in slots beside it, and its product.

A token's product with its adapter is ``(x . a) . b`` (Hu et al. 2021). There are two forms, by what
the weights' own layout is for.

On a TPU (``Masked``) all slots' ``a`` are one matrix, and so are their ``b``: every token is
multiplied by all of them, and between the two products its numbers for other slots than its own
become zero. That moves fewer bytes than to gather a token's ``a`` and ``b``, or to sort tokens by
slot; the products themselves cost nothing beside reading the weights. Where weights are split by
inputs, so is ``a``, and the sum over devices that follows is that of the adapters as well. Most
models split every factor over several devices: engine/models/adapters/split_residual.py has those
products.

On a CPU (``Apart``) products are what costs: our own kernel multiplies each token by its own adapter
alone, of which it reads what is not padding.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.models.adapters.slot_words import add_adapters
from engine.models.weights.forms import Kernel


@partial(jax.tree_util.register_dataclass, data_fields=["slots", "low"], meta_fields=["num_slots", "axis"])
@dataclass(frozen=True)
class AdapterRows:
    """The adapters of rows: a step's tokens, or rows that are sorted by expert."""

    slots: Array
    """i32[rows] each row's slot; -1 of a row without an adapter."""
    num_slots: int
    axis: str | None = None
    """The mesh axis that the residual stream and all factors of kernels are split over; None if each
    device has the whole stream."""
    low: Array | None = None
    """f[rows, parts * rank] of a split stream: each row's ``x . a``, of the kernel that reads x."""


@dataclass(frozen=True)
class Parts:
    """The modules of a checkpoint that a kernel joins: each has an adapter of its own."""

    along: int
    """The output axis that they are joined along."""
    sizes: tuple[int, ...]
    """Their sizes on it."""

    def runs(self, out: tuple[int, ...]) -> tuple[int, ...]:
        """Of each part, how many of a kernel's outputs follow each other."""
        return tuple(size * math.prod(out[self.along + 1 :]) for size in self.sizes)

    def joined(self, products: list[Array], out: tuple[int, ...]) -> Array:
        """f32[T, prod(its outputs)] of each part -> f32[T, prod(out)]."""
        if len(products) == 1:
            return products[0]
        tokens, before, after = products[0].shape[0], out[: self.along], out[self.along + 1 :]
        shaped = [
            product.reshape(tokens, *before, size, *after) for product, size in zip(products, self.sizes, strict=True)
        ]
        return jnp.concatenate(shaped, axis=1 + self.along).reshape(tokens, math.prod(out))


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["parts"])
@dataclass(frozen=True)
class Masked:
    """The factors of a kernel's parts, those of all slots side by side."""

    a: Array
    """f[parts, slots * rank, in]"""
    b: tuple[Array, ...]
    """For each part f[slots * rank, prod(its outputs)]."""
    parts: Parts

    def added(self, products: Array, x: Array, rows: AdapterRows, out: tuple[int, ...]) -> Array:
        """``products`` f32[T, prod(out)] of x f[T, in] by the kernel, with those of each row's adapter."""
        low = self._of_all_slots(x)
        return products + self._high([part.astype(x.dtype) for part in self._masked(low, rows)], out)

    def own_low(self, x: Array, rows: AdapterRows) -> Array:
        """f[T, in] -> f32[T, parts * rank], each row's product with its own slot's ``a`` alone."""
        masked = self._masked(self._of_all_slots(x), rows)
        return jnp.concatenate([part.reshape(len(x), rows.num_slots, -1).sum(axis=1) for part in masked], axis=1)

    def of_own_low(self, low: Array, rows: AdapterRows, out: tuple[int, ...]) -> Array:
        """The product of ``own_low`` with each row's ``b``, f32[T, prod(out)]."""
        of_all_slots = jnp.concatenate(
            [jnp.tile(part, (1, rows.num_slots)) for part in jnp.split(low, len(self.b), axis=1)], axis=1
        )
        return self._high(self._masked(of_all_slots, rows), out)

    def _of_all_slots(self, x: Array) -> Array:
        """f[T, in] . a -> f32[T, parts * slots * rank]."""
        count, columns, inputs = self.a.shape
        # For a result below float32 XLA:TPU would transpose the kernel.
        return jax.lax.dot_general(
            x,
            self.a.reshape(count * columns, inputs).astype(x.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=np.float32,
        )

    def _masked(self, low: Array, rows: AdapterRows) -> list[Array]:
        """f[T, parts * slots * rank] -> f[T, slots * rank] of each part, zeros for other slots."""
        count, columns = len(self.b), low.shape[1] // len(self.b)
        is_own = own_columns(rows.slots, columns, rows.num_slots)
        return [
            jnp.where(is_own, low[:, part * columns : (part + 1) * columns], np.array(0, low.dtype))
            for part in range(count)
        ]

    def _high(self, masked: list[Array], out: tuple[int, ...]) -> Array:
        """f[T, slots * rank] of each part -> f32[T, prod(out)]."""
        deltas = [
            jnp.matmul(low, b.astype(low.dtype), preferred_element_type=np.float32)
            for low, b in zip(masked, self.b, strict=True)
        ]
        return self.parts.joined(deltas, out)


def own_columns(slots: Array, columns: int, num_slots: int) -> Array:
    """bool[rows, columns] whether a column, of all slots' ranks side by side, is of a row's slot."""
    slot = jnp.arange(columns, dtype=jnp.int32) // np.int32(columns // num_slots)
    return slot[None, :] == slots[:, None]


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["parts"])
@dataclass(frozen=True)
class Apart:
    """The factors of a kernel's parts, each slot's by themselves."""

    words: Array
    """i32[slots, words], see engine/models/adapters/slot_words.py."""
    parts: Parts

    def added(self, products: Array, x: Array, rows: AdapterRows, out: tuple[int, ...]) -> Array:
        """See Masked."""
        return add_adapters(products, x, rows.slots, self.words, self.parts.runs(out))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A kernel [in, *out], and for each of its parts and slots an adapter."""

    base: Kernel
    factors: Masked | Apart

    @property
    def out(self) -> tuple[int, ...]:
        """As in Dense."""
        return self.base.out

    def product(self, x: Array, rows: AdapterRows) -> Array:
        """f[T, in] -> f32[T, prod(out)]; a row without an adapter is the base's to the bit."""
        if rows.low is not None:
            assert isinstance(self.factors, Masked)
            return self.base.product(x) + self.factors.of_own_low(rows.low, rows, self.out)
        return self.factors.added(self.base.product(x), x, rows, self.out)
