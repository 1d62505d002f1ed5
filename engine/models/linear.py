"""Products of activations with weights in any form of engine/models/weights/forms.py."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.adapters.adapted import Adapted, AdapterRows, GroupedAdapted
from engine.models.weights.factory import declared
from engine.models.weights.forms import Weight
from engine.vocabulary import Vocabulary


def linear(
    x: Array,
    kernel: nnx.Param[Weight],
    bias: nnx.Param[Array] | None,
    adapters: AdapterRows | None,
    axis: str | None = None,
) -> Array:
    """x[..., in] @ kernel[in, *out] + bias[*out] -> [..., *out] in the dtype of x.

    ``adapters`` are the step's; the kernel has such if they are not None. If the input is split
    over a mesh axis, the products are all-reduced over it.
    """
    weight = kernel.get_value()
    flat = _product(x, weight, adapters).astype(x.dtype)
    whole = (flat if axis is None else jax.lax.psum(flat, axis)).reshape(*x.shape[:-1], *weight.out)
    if bias is None:
        return whole
    return whole + bias[...].astype(whole.dtype).reshape((1,) * (x.ndim - 1) + weight.out)


def _product(x: Array, weight: Weight | Adapted | GroupedAdapted, adapters: AdapterRows | None) -> Array:
    """f[..., in] -> f32[..., prod(out)]."""
    if not isinstance(weight, Adapted | GroupedAdapted):
        return weight.product(x)
    assert adapters is not None, "a step of adapters does not say whose its tokens are"
    return weight.product(x, adapters)


def look_up(table: nnx.Param[Weight], token_ids: Array, axis: str | None = None) -> Array:
    """Rows [..., hidden] of a table [vocab, hidden] at i32[...] ids; ``axis`` splits the table."""
    weight, (_, hidden) = table.get_value(), declared(table).sizes
    if axis is None:
        return weight.rows(token_ids)[..., :hidden]
    vocabulary, (size,) = Vocabulary(axis), weight.out
    place = vocabulary.place(token_ids, size)
    here = place < size
    rows = weight.rows(jnp.minimum(place, np.int32(size - 1)))[..., :hidden]
    return vocabulary.total(jnp.where(here[..., None], rows, np.array(0, rows.dtype)))
