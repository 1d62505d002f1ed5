"""The projection of latent attention with adapters in slots beside it; see LatentProjections."""

from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from caching.attention.latent_projections import LatentFactors, LatentProjections
from engine.models.adapters.adapted import AdapterRows, own_columns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedLatents:
    """``base`` f[heads, nope + v, latent], and the factors of all slots, side by side."""

    base: Array
    low: Array
    """f[1, slots * rank, latent]"""
    high: Array
    """f[heads, nope + v, slots * rank]"""

    def projections(self, dtype: np.dtype, nope: int, rows: AdapterRows) -> LatentProjections:
        """For a step's tokens, in the dtype of their activations."""
        is_own = own_columns(rows.slots, self.low.shape[1], rows.num_slots)
        factors = LatentFactors(self.low[0].astype(dtype), self.high.astype(dtype), is_own)
        return LatentProjections(self.base.astype(dtype), nope, factors)
