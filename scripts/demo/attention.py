"""Plain causal attention over whole rows, for training and for a look at what has been learnt."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.models.decoder import Decoder
from engine.models.step_context import LayerCache, Place, StepContext

_BLOCK = 128
"""Queries at a time: a block leaves out the keys that all come after it, a fourth of the work at 256."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalAttention:
    """A StepAttention without a cache: a token sees what comes before it in its own segment. No window, cap or sinks."""

    segments: Array
    """i32[rows, length]"""
    fuses_rotation: ClassVar[bool] = False

    def __call__(
        self, spec: AttentionSpec, cache: LayerCache, _place: Place, inputs: AttentionInputs
    ) -> tuple[LayerCache, Array]:
        """q[rows, length, heads, head_dim] -> like q."""
        assert spec == AttentionSpec(spec.scale)
        q, k, bias = inputs.q, inputs.k, self._bias()
        rows, length, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        grouped = (q * spec.scale).reshape(rows, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
        keys, values = k.transpose(0, 2, 3, 1), inputs.v.transpose(0, 2, 1, 3)
        blocks = [
            _attend_block(
                grouped[:, :, :, start : start + _BLOCK],
                keys[..., : start + _BLOCK],
                values[:, :, : start + _BLOCK],
                bias[..., start : start + _BLOCK, : start + _BLOCK],
            )
            for start in range(0, length, _BLOCK)
        ]
        return cache, jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)

    def _bias(self) -> Array:
        """f32[rows, 1, 1, length, length], 0 where a token is seen."""
        segments, length = self.segments, self.segments.shape[1]
        visible = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((1, length, length), bool))
        return jnp.where(visible, 0.0, -1e9)[:, None, None]


def hidden_of_rows(model: Decoder, ids: Array, positions: Array, segments: Array) -> Array:
    """f[rows, length, hidden]: the last hidden states of whole rows, without a cache.

    All are i32[rows, length]. A token sees what comes before it in its own segment.
    """
    step = StepContext(model.rotations(positions), CausalAttention(segments), positions=positions)
    _, hidden = model(ids, [None] * model.partition.model.num_layers, step)
    return hidden


def _attend_block(q: Array, keys: Array, values: Array, bias: Array) -> Array:
    """q[rows, kv_heads, group, queries, dim], keys[rows, kv_heads, dim, keys], values[rows, kv_heads, keys, dim] -> like q.

    A group's queries share their keys, so they are folded into one matrix product.
    """
    *lead, group, queries, dim = q.shape
    folded = q.reshape(*lead, group * queries, dim)
    scores = jnp.matmul(folded, keys).reshape(*lead, group, queries, -1) + bias
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    attended = jnp.matmul(weights.reshape(*lead, group * queries, -1), values).reshape(q.shape)
    return attended / weights.sum(axis=-1, keepdims=True)
