"""The residual stream of a step with adapters on several devices, of which each has its part.

A layer's two sums over devices are each a reduce-scatter and an all-gather. Between them a device
has its part of the hidden dimensions, and with it products of all rows with its part of every
factor, also of those that are split by neither inputs nor outputs as kernels are. So no factor is
whole on any device, and no exchange is added:

- Of a kernel whose inputs are split (o and down), the reduce-scatter sums beside the products those
  of ``a``, of a row only its own slot's. They are as many columns as an adapter has ranks. Then
  each device adds them times its outputs of ``b``.
- Of a kernel behind a norm (qkv, gate and up), the all-gather has beside a device's part of the
  stream the product of that part with its inputs of ``a``. The norm's factor of a row is known
  behind the exchange; the sum of these products is multiplied by it.

That holds for plain pre-norm blocks (engine/models/adapters/split_models.py has which). All other
models keep the whole stream on each device.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from engine.models.adapters.adapted import Adapted, AdapterRows, Masked
from engine.models.layers.norm import RMSNorm
from engine.models.layers.row_operations import norm_factor
from engine.models.weights.forms import Kernel


def own_part(x: Array, axis: str) -> Array:
    """f[..., hidden], the same on all devices -> f[..., part], this device's."""
    size = x.shape[-1] // int(jax.lax.axis_size(axis))
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, axis=x.ndim - 1)


def whole(part: Array, axis: str) -> Array:
    """f[..., part] -> f[..., hidden] on all devices."""
    gathered: Array = jax.lax.all_gather(part, axis, axis=part.ndim - 1, tiled=True)
    return gathered


def normed(part: Array, norm: RMSNorm, weight: Kernel | Adapted, rows: AdapterRows) -> tuple[Array, AdapterRows]:
    """The norm f[T, hidden] of the whole stream, of which this device has f[T, part].

    Also the rows with ``low`` of the kernel that reads it.
    """
    assert rows.axis is not None and norm.scale is not None
    factors, size = _factors(weight), part.shape[1]
    if factors is None:
        return norm(whole(part, rows.axis)), rows
    scaled = part.astype(jnp.float32) * own_part(norm.scale[...], rows.axis)[None]
    low = factors.own_low(scaled.astype(part.dtype), rows)
    sent = jnp.concatenate([part, low.astype(part.dtype)], axis=1)
    parts = jax.lax.all_gather(sent, rows.axis)
    x = parts[..., :size].swapaxes(0, 1).reshape(len(part), -1)
    summed = parts[..., size:].astype(jnp.float32).sum(axis=0) * norm_factor(x.astype(jnp.float32), norm.eps)
    return norm(x), replace(rows, low=summed.astype(part.dtype))


def summed_part(x: Array, weight: Kernel | Adapted, rows: AdapterRows) -> Array:
    """f[T, in], split by inputs, times a kernel -> this device's part f[T, part] of the sum over devices."""
    assert rows.axis is not None
    factors, devices = _factors(weight), int(jax.lax.axis_size(rows.axis))
    base = weight.base if isinstance(weight, Adapted) else weight
    parts = base.product(x).astype(x.dtype).reshape(len(x), devices, -1).swapaxes(0, 1)
    if factors is None:
        return _sum_of_own(parts, rows.axis)
    size, low = parts.shape[-1], factors.own_low(x, rows).astype(x.dtype)
    parts = jnp.concatenate([parts, jnp.broadcast_to(low, (devices, *low.shape))], axis=2)
    summed = _sum_of_own(parts, rows.axis)
    delta = factors.of_own_low(summed[:, size:], rows, (size,))
    return (summed[:, :size].astype(jnp.float32) + delta).astype(x.dtype)


def _sum_of_own(parts: Array, axis: str) -> Array:
    """f[devices, T, n] -> f[T, n], over devices the sum of what is for this one."""
    # Of three axes XLA:TPU would reduce all parts on four chips, and drop those of others.
    rows = parts.reshape(-1, parts.shape[-1])
    summed: Array = jax.lax.psum_scatter(rows, axis, tiled=True)
    return summed


def _factors(weight: Kernel | Adapted) -> Masked | None:
    if not isinstance(weight, Adapted):
        return None
    assert isinstance(weight.factors, Masked)
    return weight.factors
