"""A kernel with adapters in slots beside it, and its product.

A token's product with its adapter is ``(x . a) . b`` (Hu et al. 2021). All slots' ``a`` are one
matrix, and so are their ``b``: every token is multiplied by all of them, and between the two
products its numbers for other slots than its own become zero. On a TPU that moves fewer bytes than
to gather a token's ``a`` and ``b``, or to sort tokens by slot; the products themselves cost nothing
beside reading the weights. Where weights are split by inputs, so is ``a``, and the sum over devices
that follows is that of the adapters as well.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.models.weights.forms import Kernel


@partial(jax.tree_util.register_dataclass, data_fields=["slots"], meta_fields=["num_slots"])
@dataclass(frozen=True)
class AdapterRows:
    """The adapters of a step's tokens."""

    slots: Array
    """i32[T] each token's slot; ``num_slots`` of a token without an adapter."""
    num_slots: int


@dataclass(frozen=True)
class Parts:
    """The modules of a checkpoint that a kernel joins: each has an adapter of its own."""

    along: int
    """The output axis that they are joined along."""
    sizes: tuple[int, ...]
    """Their sizes on it."""


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["parts"])
@dataclass(frozen=True)
class Adapted:
    """A kernel [in, *out], and for each of its parts and slots an adapter of ``rank``."""

    base: Kernel
    a: Array
    """f[parts, slots * rank, in]"""
    b: tuple[Array, ...]
    """For each part f[slots * rank, prod(its outputs)]."""
    parts: Parts

    @property
    def out(self) -> tuple[int, ...]:
        """As in Dense."""
        return self.base.out

    def product(self, x: Array, rows: AdapterRows) -> Array:
        """f[T, in] -> f32[T, prod(out)]; a row without an adapter is the base's to the bit."""
        (count, columns, inputs), tokens = self.a.shape, x.shape[0]
        # For a result below float32 XLA:TPU would transpose the kernel.
        low = jax.lax.dot_general(
            x,
            self.a.reshape(count * columns, inputs).astype(x.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=np.float32,
        )
        slot = jnp.arange(columns, dtype=jnp.int32) // np.int32(columns // rows.num_slots)
        is_own = slot[None, :] == rows.slots[:, None]
        masked = [
            jnp.where(is_own, low[:, part * columns : (part + 1) * columns], np.float32(0)).astype(x.dtype)
            for part in range(count)
        ]
        deltas = [
            jnp.matmul(one, b.astype(x.dtype), preferred_element_type=np.float32)
            for one, b in zip(masked, self.b, strict=True)
        ]
        return self.base.product(x) + self._joined(deltas, tokens)

    def _joined(self, deltas: list[Array], tokens: int) -> Array:
        """f32[T, prod(outputs)] of each part -> f32[T, prod(out)]."""
        if len(deltas) == 1:
            return deltas[0]
        before, after = self.out[: self.parts.along], self.out[self.parts.along + 1 :]
        shapes = [(tokens, *before, size, *after) for size in self.parts.sizes]
        shaped = [delta.reshape(shape) for delta, shape in zip(deltas, shapes, strict=True)]
        return jnp.concatenate(shaped, axis=1 + self.parts.along).reshape(tokens, math.prod(self.out))
