"""Products of activations with weights in any form of engine/models/weights/forms.py."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.adapters.adapted import Adapted, AdapterRows
from engine.models.adapters.adapted_experts import AdaptedExperts
from engine.models.adapters.adapted_table import AdaptedTable
from engine.models.adapters.split_residual import own_part, summed_part
from engine.models.weights.factory import declared
from engine.models.weights.forms import Experts, Weight
from engine.models.weights.weight_format import Groups, Layout
from engine.vocabulary import Vocabulary

UNSAID = "a step of adapters does not say whose its tokens are"


def linear(
    x: Array,
    kernel: nnx.Param[Weight],
    bias: nnx.Param[Array] | None,
    adapters: AdapterRows | None,
    axis: str | None = None,
) -> Array:
    """x[..., in] @ kernel[in, *out] + bias[*out] -> [..., *out] in the dtype of x.

    ``adapters`` are the step's; the kernel has such if they are not None. If the input is split
    over a mesh axis, the products are all-reduced over it; where the residual stream is split, each
    device gets its part of them, [..., part].
    """
    weight = kernel.get_value()
    if axis is not None and adapters is not None and adapters.axis is not None:
        part = summed_part(x, weight, adapters)
        return part if bias is None else part + own_part(bias[...], axis).astype(part.dtype)[None]
    flat = _product(x, weight, adapters).astype(x.dtype)
    whole = (flat if axis is None else jax.lax.psum(flat, axis)).reshape(*x.shape[:-1], *weight.out)
    if bias is None:
        return whole
    return whole + bias[...].astype(whole.dtype).reshape((1,) * (x.ndim - 1) + weight.out)


def _product(x: Array, weight: Weight | Adapted, adapters: AdapterRows | None) -> Array:
    """f[..., in] -> f32[..., prod(out)]."""
    if not isinstance(weight, Adapted):
        return weight.product(x)
    assert adapters is not None, UNSAID
    return weight.product(x, adapters)


def grouped(x: Array, weight: Experts | AdaptedExperts, groups: Groups, adapters: AdapterRows | None) -> Array:
    """x[rows, in], sorted by expert -> f32[rows, prod(out)]; undefined behind all groups."""
    if not isinstance(weight, AdaptedExperts):
        return weight.grouped_product(x, groups)
    assert adapters is not None, UNSAID
    return weight.grouped_product(x, groups, adapters)


def look_up(
    table: nnx.Param[Weight], token_ids: Array, adapters: AdapterRows | None = None, axis: str | None = None
) -> Array:
    """Rows [..., hidden] of a table [vocab, hidden] at i32[...] ids; ``axis`` splits the table."""
    weight, (_, hidden) = table.get_value(), declared(table).sizes
    if axis is None:
        return _rows(weight, token_ids, hidden, adapters)
    vocabulary, (size,) = Vocabulary(axis), weight.out
    place = vocabulary.place(token_ids, size)
    here = place < size
    rows = _rows(weight, jnp.minimum(place, np.int32(size - 1)), hidden, adapters)
    return vocabulary.total(jnp.where(here[..., None], rows, np.array(0, rows.dtype)))


def _rows(weight: Weight | AdaptedTable, places: Array, hidden: int, adapters: AdapterRows | None) -> Array:
    if not isinstance(weight, AdaptedTable):
        return weight.rows(places)[..., :hidden]
    assert adapters is not None, UNSAID
    return weight.rows(places, hidden, adapters)


def table_logits(hidden: Array, weight: Weight | AdaptedTable, adapters: AdapterRows | None) -> Array:
    """f[..., hidden] by a table [vocab, hidden] -> f32[..., vocab]; ``adapters`` are those of its
    rows."""
    if not isinstance(weight, AdaptedTable):
        return weight.logits(hidden)
    assert adapters is not None, UNSAID
    return weight.logits(hidden, adapters)


def skips_zeros(table: Weight | AdaptedTable) -> bool:
    """Whether products skip rows of zeros at the end: those of a CPU's kernel do, which has panels."""
    base = table.base if isinstance(table, AdaptedTable) else table
    return base.layout is Layout.PANELS


def zero_behind(x: Array, count: Array, table: Weight | AdaptedTable) -> Array:
    """f[rows, hidden] with zeros behind the first i32[] ``count`` rows, if products skip those."""
    if not skips_zeros(table):
        return x
    counts = jnp.arange(len(x), dtype=jnp.int32) < count
    return jnp.where(counts[:, None], x, np.array(0, x.dtype))
