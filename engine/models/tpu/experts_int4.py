"""The grouped product of experts in 4 bits on a TPU, by our own Pallas kernel.

XLA:TPU has none: ``jax.lax.ragged_dot`` refuses int4, and kernels that are widened before it are
written to HBM. The grid goes over the columns and, within them, over pairs of an expert and a tile
of rows, as in MegaBlocks (Gale et al. 2022): an expert without rows is in no pair, and is not read.
The first pair of an expert widens and scales its columns in VMEM, and the others use them again.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from caching.tpu.tpu_chip import LANES, VMEM_LIMIT_BYTES

INPUTS_OF_TILE = 64
"""Rows of a tile of int4 in HBM: a group of inputs is of whole tiles."""
SCALES_OF_TILE = 8
"""Rows of a tile of scales: XLA would lay out less than whole ones by outputs, and copy them."""
LEAST_ROWS, MOST_ROWS = 32, 128
"""Of a tile, which the rows of an expert seldom fill, and of a TPU's matrix unit."""
WIDENED_NUMBERS = 2**22
"""Inputs times columns that are widened at a time, to 8 MiB of bfloat16."""

Ref = Any
Index = tuple[Any, ...]


class Pairs(NamedTuple):
    """An expert and a tile of rows each, sorted by both; i32[pairs], of which ``number`` are."""

    experts: Array
    tiles: Array
    begins: Array
    """The first row of the expert."""
    ends: Array
    number: Array
    """i32[]; at least 1, which may have no rows."""


def grouped_product(
    x: Array, values: Array, scales: Array, sizes: Array, first: Array, *, group: int, interpret: bool = False
) -> Array:
    """f[rows, in], sorted by expert, by their kernels -> f32[rows, out]; undefined behind all rows.

    ``values`` s4[kernels, in, out] and ``scales`` f[kernels, groups, out] are of ``group`` inputs,
    a multiple of INPUTS_OF_TILE, each; scales behind the last group are not read. The experts are
    the kernels from i32[] ``first`` on, and i32[experts] ``sizes`` the rows of each.
    """
    (rows, depth), width = x.shape, values.shape[2]
    tile, columns = tile_rows(rows, len(sizes)), block_columns(depth, width)
    pairs = pairs_of(sizes, rows, tile)

    def of_rows(column: Array, pair: Array, first: Ref, experts: Ref, tiles: Ref, *_: Ref) -> Index:  # noqa: ARG001
        return tiles[pair], 0

    def of_kernel(column: Array, pair: Array, first: Ref, experts: Ref, *_: Ref) -> Index:
        return first[0] + experts[pair], 0, column

    def of_product(column: Array, pair: Array, first: Ref, experts: Ref, tiles: Ref, *_: Ref) -> Index:  # noqa: ARG001
        return tiles[pair], column

    call = pl.pallas_call(
        partial(_kernel, group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(width, columns), pairs.number),
            in_specs=[
                pl.BlockSpec((tile, depth), of_rows),
                pl.BlockSpec((1, depth, columns), of_kernel),
                pl.BlockSpec((1, scales.shape[1], columns), of_kernel),
            ],
            out_specs=pl.BlockSpec((tile, columns), of_product),
            scratch_shapes=[
                pltpu.VMEM((depth, columns), x.dtype),
                pltpu.VMEM((scales.shape[1], columns), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="odriver_experts_int4",
    )
    if not interpret:
        # XLA would fetch those of all layers to VMEM before each call.
        scales = pltpu.with_memory_space_constraint(scales, pltpu.HBM)
    product: Array = call(first[None], *pairs[:-1], x, values, scales)
    return product


def tile_rows(rows: int, experts: int) -> int:
    """Rows that are multiplied at once: about those of an expert."""
    of_expert = pl.next_power_of_2(-(-rows // experts))
    return min(rows, MOST_ROWS, max(LEAST_ROWS, of_expert))


def block_columns(depth: int, width: int) -> int:
    """Columns that are widened at once."""
    return min(width, max(1, WIDENED_NUMBERS // depth // LANES) * LANES)


def pairs_of(sizes: Array, rows: int, tile: int) -> Pairs:
    """The pairs of i32[experts] ``sizes`` with tiles of so many of all ``rows``."""
    ends, tiles = jnp.cumsum(sizes), -(-rows // tile)
    begins = ends - sizes
    first = begins // tile
    counts = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, 0)
    behind = jnp.cumsum(counts)
    number = jnp.arange(tiles + min(len(sizes), rows), dtype=jnp.int32)  # neighbours share a tile
    experts = jnp.sum(behind[None] <= number[:, None], axis=1, dtype=jnp.int32)
    experts = jnp.minimum(experts, np.int32(len(sizes) - 1))
    of_pair = first[experts] + number - (behind - counts)[experts]
    return Pairs(
        experts,
        jnp.clip(of_pair, 0, tiles - 1),
        begins[experts],
        ends[experts],
        jnp.maximum(behind[-1], 1),
    )


def _kernel(
    group: int, _: Ref, experts: Ref, tiles: Ref, begins: Ref, ends: Ref, x: Ref, values: Ref, scales: Ref, out: Ref,
    widened: Ref, wide_scales: Ref,
) -> None:  # fmt: skip
    """One pair: its rows of a tile of ``out``, of which other pairs have others."""
    pair = pl.program_id(1)

    @pl.when((pair == 0) | (experts[pair] != experts[jnp.maximum(pair - 1, 0)]))
    def widen() -> None:
        wide_scales[...] = scales[0].astype(jnp.float32)

        @pl.loop(0, widened.shape[0] // group)
        def widen_group(number: Array) -> None:
            inputs = pl.ds(pl.multiple_of(number * group, group), group)
            wide = values[0, inputs, :].astype(jnp.float32) * wide_scales[pl.ds(number, 1), :]
            widened[inputs, :] = wide.astype(widened.dtype)

    rows = tiles[pair] * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    is_mine = (rows >= begins[pair]) & (rows < ends[pair])
    product = jnp.dot(x[...], widened[...], preferred_element_type=jnp.float32)
    out[...] = jnp.where(is_mine, product, out[...])
