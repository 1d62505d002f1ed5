"""Rotary position embedding: a layer's frequencies, and the rotation of queries and keys."""

import math
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.models.rope_spec import RopeSpec
from engine.models.spec import ModelSpec


class Rotation(NamedTuple):
    """What positions do to the queries and keys of a step's layers that share a rope."""

    cos: Array
    """f32[..., 1, pairs] for as many pairs of dimensions as are rotated."""
    sin: Array
    query_scale: Array | None
    """f32[..., 1, 1]"""


def inverse_frequencies(head_dim: int, rope: RopeSpec, longest: int) -> NDArray[np.float32]:
    """Radians per position, f32[pairs]; scaled as in transformers' modeling_rope_utils.

    ``longest`` is the length in tokens of the longest sequence that is served.
    """
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    inverse = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / max(dim, 1))
    if rope.scaling == "linear":
        inverse = inverse / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * np.pi / inverse
        rotations = rope.original_max_position / wavelength
        band = rope.high_freq_factor - rope.low_freq_factor
        above = rotations - rope.low_freq_factor
        smooth = np.clip(above / band, 0.0, 1.0) if band else (above > 0).astype(np.float64)  # Llama 4 Scout has none
        inverse = (1 - smooth) * inverse / rope.factor + smooth * inverse
    elif rope.scaling == "yarn":
        slow = _slow_share(dim, rope)
        inverse = inverse * (1 - slow) + inverse / rope.factor * slow
    elif rope.scaling == "longrope":
        is_long = longest > rope.original_max_position
        inverse = inverse / np.array(rope.long_factor if is_long else rope.short_factor)
    elif rope.scaling == "proportional":
        inverse = np.where(np.arange(dim // 2) < rope.turning_pairs, inverse / rope.factor, 0.0)
    elif rope.scaling != "default":
        raise ValueError(f"unknown rope scaling {rope.scaling!r}")
    return inverse.astype(np.float32)


def _slow_share(dim: int, rope: RopeSpec) -> NDArray[np.float64]:
    """YaRN's ramp over pairs: 0 where a pair turns often in the original context, 1 where not."""

    def pair(rotations: float) -> float:
        """The pair, with fractions, that turns so often in the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return np.clip((np.arange((dim + 1) // 2) - low) / width, 0.0, 1.0)


def rotation(positions: Array, inverse: NDArray[np.float32], rope: RopeSpec) -> Rotation:
    """The rotation at i32[...] positions; the axis of length 1 broadcasts over heads."""
    wide = positions[..., None, None].astype(jnp.float32)
    angles = wide * inverse.reshape((1,) * (positions.ndim + 1) + (-1,))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * np.float32(rope.attention_factor), sin * np.float32(rope.attention_factor)
    if not rope.query_scale_beta:
        return Rotation(cos, sin, None)
    spans = jnp.floor((wide + np.float32(rope.query_scale_start)) / np.float32(rope.original_max_position))
    return Rotation(cos, sin, np.float32(1) + np.float32(rope.query_scale_beta) * jnp.log1p(spans))


def rotations(model: ModelSpec, positions: Array, longest: int | None = None) -> tuple[Rotation, ...]:
    """The rotation of each of a model's ropes at i32[...] positions.

    ``longest`` is the length of the longest sequence that is served; by default the model's.
    """
    lengths = longest or model.max_position
    return tuple(
        rotation(positions, inverse_frequencies(head_dim, rope, lengths), _of_length(rope, lengths))
        for rope, head_dim in model.ropes
    )


def _of_length(rope: RopeSpec, longest: int) -> RopeSpec:
    """With the factor of cosines and sines that goes with its long factors, if these are used."""
    if rope.long_attention_factor is None or longest <= rope.original_max_position:
        return rope
    return replace(rope, attention_factor=rope.long_attention_factor)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x[..., heads, head_dim] by its positions, in float32; the result has x's dtype.

    Dimensions behind the rotated ones stay as they are.
    """
    pairs = cos.shape[-1]
    if not pairs:
        return x
    first, second, rest = jnp.split(x.astype(jnp.float32), (pairs, 2 * pairs), axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1).astype(x.dtype)


def half_split(x: Array, dims: int) -> Array:
    """x[..., head_dim] with even dimensions of the first ``dims`` before the odd ones.

    Scores do not change if queries and keys are both reordered.
    """
    pairs = x[..., :dims].reshape(*x.shape[:-1], dims // 2, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x[..., dims:]], axis=-1)
