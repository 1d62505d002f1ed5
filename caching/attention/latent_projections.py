"""What makes keys and values of latents, for each head, and an adapter's factors beside it (Hu et al. 2021).

With an adapter a head's projection is ``base + high . low``, of the slot of the token's adapter. The
factors of all slots are multiplied at once, and between the two products a token's numbers for other
slots than its own become zero.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentFactors:
    """The factors of adapters in slots, side by side."""

    low: Array
    """f[columns, rank]: of each slot as many columns as an adapter may have ranks."""
    high: Array
    """f[heads, nope + v, columns]"""
    is_own: Array
    """bool[T, columns] whether a column is of a token's own slot."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentProjections:
    """Of latents to each head's keys, and behind them to its values. Results are float32.

    Factors are those of ``tokens`` i32[...], which say whose adapter a row has: any token of the same
    sequence does.
    """

    base: Array
    """f[heads, nope + v, rank]"""
    nope: int = field(metadata={"static": True})
    """Numbers of a head's key."""
    factors: LatentFactors | None = None

    def of_queries(self, q: Array, tokens: Array) -> Array:
        """Queries f[n, heads, nope] as they score latents, f[n, heads, rank]; i32[n] ``tokens``."""
        of_keys, _ = self._parts(self.base)
        projected = product("thn,hnr->thr", q, of_keys)
        if self.factors is None:
            return projected
        high, _ = self._parts(self.factors.high)
        own = _own(product("thn,hnc->thc", q, high), self.factors.is_own[tokens][:, None, :])
        return projected + product("thc,cr->thr", own.astype(q.dtype), self.factors.low)

    def of_means(self, latents: Array, tokens: Array) -> Array:
        """Means of latents f[n, heads, rank] -> values f[n, heads, v]; i32[n] ``tokens``."""
        _, of_values = self._parts(self.base)
        values = product("thr,hvr->thv", latents, of_values)
        if self.factors is None:
            return values
        _, high = self._parts(self.factors.high)
        low = _own(product("thr,cr->thc", latents, self.factors.low), self.factors.is_own[tokens][:, None, :])
        return values + product("thc,hvc->thv", low.astype(latents.dtype), high)

    def expanded(self, latents: Array, token: Array) -> tuple[Array, Array]:
        """One sequence's latents f[n, rank] -> keys f[heads, n, nope], values f[heads, n, v]; i32[] ``token``."""
        keys, values = (product("br,hnr->hbn", latents, part) for part in self._parts(self.base))
        if self.factors is None:
            return keys, values
        low = _own(product("br,cr->bc", latents, self.factors.low), self.factors.is_own[token][None])
        own_keys, own_values = (
            product("bc,hnc->hbn", low.astype(latents.dtype), part) for part in self._parts(self.factors.high)
        )
        return keys + own_keys, values + own_values

    def _parts(self, both: Array) -> tuple[Array, Array]:
        """f[heads, nope + v, ...] of keys, and of values."""
        return both[:, : self.nope], both[:, self.nope :]


def product(subscripts: str, *factors: Array) -> Array:
    """An einsum in the dtype of the first factor, with sums in float32."""
    return jnp.einsum(subscripts, *(x.astype(factors[0].dtype) for x in factors), preferred_element_type=jnp.float32)


def _own(low: Array, is_own: Array) -> Array:
    return jnp.where(is_own, low, np.float32(0))
