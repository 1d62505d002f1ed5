"""The dtypes of keys and values in pages, and how the pages of XLA and the CPU store them.

float8_e4m3fn and float8_e5m2 have their own exponents and need no scales: a number above their
largest becomes the largest. int8 has a scale for each token and head: the largest magnitude / 127,
computed when the token is written. So nothing is calibrated, and an outlier costs precision only
in its own token and head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SCALE_BYTES = 4
"""A scale is a float32."""
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
STORED_AS: dict[str, np.dtype] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}
"""XLA:CPU has no arithmetic in these: each write and read would convert the pool to float32."""
NAMES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(jnp.bfloat16),
    "float32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(jnp.float8_e4m3fn),
    "fp8_e4m3": np.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": np.dtype(jnp.float8_e5m2),
}
"""vLLM's names of kv_cache_dtype."""


def is_scaled(dtype: np.dtype) -> bool:
    """Whether pages of this dtype have scales."""
    return dtype == np.int8


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the arrays: small floats are stored as their bits."""
    return STORED_AS.get(dtype.name, dtype)


def stored_head_dim(head_dim: int, dtype: np.dtype) -> int:
    """Elements of a head's keys or values of one token, a scale included."""
    return head_dim + (SCALE_BYTES // dtype.itemsize if is_scaled(dtype) else 0)


def rounded(x: Array, dtype: np.dtype) -> Array:
    """f[...] in this float dtype; numbers too large for 8 bits saturate, NaN stays NaN."""
    if dtype.name in LARGEST:
        largest = np.array(LARGEST[dtype.name], x.dtype)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def quantize(x: Array, axis: int = -1) -> tuple[Array, Array]:
    """Symmetric int8, like x, and f32 scales without ``axis``; NaN in x makes its scale NaN."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis) / np.float32(127)
    steps = wide / jnp.expand_dims(jnp.where(scale == 0, np.float32(1), scale), axis)
    return jnp.round(steps).astype(jnp.int8), scale


def as_stored(x: Array, dtype: np.dtype) -> Array:
    """Keys or values f[..., head_dim] -> [..., stored_head_dim], a scale's bytes at the end."""
    if is_scaled(dtype):
        numbers, scale = quantize(x)
        return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(scale, jnp.int8)], axis=-1)
    stored = stored_dtype(dtype)
    small = rounded(x, dtype)
    return small if stored == dtype else jax.lax.bitcast_convert_type(small, stored)


def as_read(stored: Array, dtype: np.dtype, to: np.dtype) -> Array:
    """The inverse of ``as_stored``: [..., stored_head_dim] -> [..., head_dim] in dtype ``to``."""
    if is_scaled(dtype):
        scale = jax.lax.bitcast_convert_type(stored[..., -SCALE_BYTES:], jnp.float32)
        return (stored[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]).astype(to)
    if stored.dtype != dtype:
        stored = jax.lax.bitcast_convert_type(stored, dtype)
    return stored.astype(to)
