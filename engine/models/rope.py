"""Rotary position embedding in the half-split form of Hugging Face checkpoints."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.models.spec import RopeSpec

Rotation = tuple[Array, Array]
"""Cosines and sines, f32[..., 1, head_dim / 2]."""


def inverse_frequencies(head_dim: int, rope: RopeSpec) -> NDArray[np.float32]:
    """Radians per position, f32[head_dim / 2]; scaled as in transformers' modeling_rope_utils."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        inverse = inverse / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * np.pi / inverse
        rotations = rope.original_max_position / wavelength
        smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        inverse = (1 - smooth) * inverse / rope.factor + smooth * inverse
    elif rope.scaling != "default":
        raise ValueError(f"unknown rope scaling {rope.scaling!r}")
    return inverse.astype(np.float32)


def rotation(positions: Array, inverse: NDArray[np.float32]) -> Rotation:
    """Cosines and sines at i32[...] positions; the axis of length 1 broadcasts over heads."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse.reshape((1,) * (positions.ndim + 1) + (-1,))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x[..., heads, head_dim] by its positions, in float32; the result has x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
