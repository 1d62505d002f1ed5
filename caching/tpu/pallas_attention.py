"""Ragged paged attention on a TPU by our own Pallas kernel, which also writes the step's pages.

The idea is Kwon et al. 2023; the names are those of jax's own kernel and of tpu-inference's. One
call writes all new keys and values to their pages (caching/tpu/pallas_writes.py), then attends
(caching/tpu/pallas_rows.py): rows of a single query one by one, other rows a tile of queries at a
time. It also runs in Pallas' interpreter, where tests compare it with plain attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import is_scaled, rounded
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu.jax_attention import block_pages
from caching.tpu.pallas_geometry import Geometry, Ref, Table, TableBlocks, granule, piece, table_blocks
from caching.tpu.pallas_rows import attend_rows
from caching.tpu.pallas_spans import Spans
from caching.tpu.pallas_writes import replicated, write_rows
from caching.tpu.tpu_chip import LANES, SUBLANES, VMEM_LIMIT_BYTES, Chip

TILE_ROWS = 256
"""Queries of a tile times query heads per kv head."""


def stored_heads(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    """The kv_heads and head_dim of pages: a key and its value fill whole registers together."""
    del dtype
    return kv_heads, -(-2 * head_dim // LANES) * LANES // 2


def misfit(page_size: int, dtype: np.dtype, extras: str | None) -> str | None:
    """Why the kernel cannot read such pages, and what to choose instead; it has all extras."""
    del extras
    if is_scaled(dtype):
        return f"kv_cache_dtype {dtype} has a scale for each token: choose fp8, or attention_backend xla"
    if page_size % granule(dtype):
        return f"page_size {page_size} is no multiple of {granule(dtype)}: choose one that is, or attention_backend xla"
    return None


def allocate(metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
    """Zeroed pages on the default device. Raises jax.errors.JaxRuntimeError if they do not fit."""
    page = (metadata.num_kv_heads, metadata.page_size, 2 * metadata.head_dim)
    return PagedAttentionCache(tuple(jnp.zeros((pages, *page), metadata.dtype) for pages in metadata.array_pages))


def tokens_read(chip: Chip, page: PagedAttentionCacheMetaData, pages_per_seq: int, tokens: int) -> int:
    """Tokens whose keys and values the kernel reads for a row of ``tokens``: whole pieces."""
    del chip, pages_per_seq
    size = piece(page.page_size, page.dtype)
    return -(-tokens // size) * size


def tokens_written(page: PagedAttentionCacheMetaData) -> float:
    """Tokens moved per token written: its granule, read and written, and a word per number."""
    return 2 * granule(page.dtype) + 2 * 4 / page.dtype.itemsize


@dataclass(frozen=True)
class PallasAttention:
    """Attention over pages [num_pages, kv_heads, page_size, 2 * head_dim] on one kind of chip."""

    chip: Chip
    interpret: Any = False
    """True, or the parameters of Pallas' interpreter, to run without a chip."""
    fuses_rotation: ClassVar[bool] = False

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """See AttentionKernel."""
        kv_pages, q = view.pages, inputs.q
        head_dim, half = q.shape[-1], kv_pages.shape[-1] // 2
        geometry = self._geometry(kv_pages, q, view.table)
        grouped = q.reshape(q.shape[0], geometry.kv_heads, geometry.group, head_dim)
        grouped = _widened(grouped, geometry.head_width)
        new = None
        if inputs.k is not None and inputs.v is not None:
            both = jnp.concatenate([_widened(inputs.k, half), _widened(inputs.v, half)], axis=-1)
            new = replicated(rounded(both, kv_pages.dtype))
        kv_pages, out = self._call(geometry, spec, view, grouped, new, inputs.sinks)
        values = out[..., :head_dim] if geometry.halved else out[..., half : half + head_dim]
        return kv_pages, values.reshape(q.shape)

    def _geometry(self, kv_pages: Array, q: Array, table: PageTable) -> Geometry:
        _, kv_heads, page_size, width = kv_pages.shape
        rows, pages_per_seq = table.page_indices.shape
        return Geometry(
            tokens=q.shape[0],
            rows=rows,
            kv_heads=kv_heads,
            group=q.shape[1] // kv_heads,
            page_size=page_size,
            table=table_blocks(rows, pages_per_seq),
            width=width,
            block_pages=block_pages(self.chip, kv_pages, pages_per_seq),
            dtype=np.dtype(kv_pages.dtype),
        )

    def _call(
        self, geometry: Geometry, spec: AttentionSpec, view: CacheView, q: Array, new: Array | None, sinks: Array | None
    ) -> tuple[Array, Array]:
        kv_pages, table = view.pages, view.table
        scalars = (
            table.kv_lens,
            table.cu_q_lens,
            jnp.concatenate([table.num_decodes[None], table.num_seqs]),
        )
        tile = _tile(geometry)
        arrays = [geometry.table.padded(table.page_indices), q]
        if new is not None:
            arrays.append(new)
        in_hbm = len(arrays)
        if sinks is not None:
            by_group = sinks.astype(jnp.float32).reshape(geometry.kv_heads, 1, geometry.group)
            arrays.append(jnp.tile(by_group, (1, tile, 1)).reshape(geometry.kv_heads, -1, 1))
        places = [pl.BlockSpec(memory_space=pl.ANY)] * in_hbm
        places += [pl.BlockSpec(memory_space=pltpu.VMEM)] * (len(arrays) - in_hbm)
        call = pl.pallas_call(
            partial(_kernel, geometry, spec, tile, new is not None),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(),
                in_specs=[*places, pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ),
            out_shape=[
                jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
                jax.ShapeDtypeStruct(q.shape, q.dtype),
            ],
            input_output_aliases={len(scalars) + len(arrays): 0},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
            interpret=self.interpret,
            name="odriver_ragged_paged_attention",
        )
        written, out = call(*scalars, *arrays, kv_pages)
        return written, out


def _widened(x: Array, width: int) -> Array:
    """x[..., d] -> [..., width], zeros appended."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


def _tile(geometry: Geometry) -> int:
    """Queries computed together, in rows that have several."""
    return min(geometry.tokens, max(1, TILE_ROWS // geometry.group // SUBLANES) * SUBLANES)


def _kernel(geometry: Geometry, spec: AttentionSpec, tile: int, writes: bool, *refs: Ref) -> None:
    """Refs: 3 scalars, page table, q, new tokens if any, sinks if any, pages, the pages as output,
    the result.

    All blocks are written before any is read: a row may read what one of another block writes.
    """
    page_indices, q, *given, _, pages, out = refs[3:]
    sinks = given[1:] if writes else given

    def attend(table: Table, size: int, begin: Array, past: Array) -> None:
        mine = sinks[0].at[:, pl.ds(0, size * geometry.group)] if sinks else None
        attend_rows(Spans(geometry, spec, table, size, begin, past), pages, q, out, mine)

    def attend_block(table: Table) -> None:
        attend(table, 1, *table.decodes())
        if geometry.tokens > 1:
            attend(table, tile, *table.others())

    def write_block(table: Table) -> None:
        write_rows(geometry, table, given[0], pages)

    each_block = partial(_for_each_block, geometry.table, refs[:3], page_indices)
    if not writes:
        each_block(attend_block)
    elif geometry.rows <= geometry.table.rows:
        each_block(write_block, attend_block)
    else:
        each_block(write_block)
        each_block(attend_block)


def _for_each_block(
    blocks: TableBlocks, scalars: tuple[Ref, Ref, Ref], page_indices: Ref, *bodies: Callable[[Table], None]
) -> None:
    """Fetch each block of the page table, and run these for its rows."""
    rows = scalars[2][1]

    def with_scratch(block: Ref, arrived: Ref) -> None:
        @pl.loop(0, (rows + (blocks.rows - 1)) // blocks.rows)
        def _(index: Array) -> None:
            here = pl.ds(pl.multiple_of(index * blocks.size, blocks.size), blocks.size)
            copy = pltpu.make_async_copy(page_indices.at[here], block, arrived)
            copy.start()
            copy.wait()
            begin = index * blocks.rows
            table = Table(*scalars, blocks, block, begin, jnp.minimum(begin + blocks.rows, rows))
            for body in bodies:
                body(table)

    pl.run_scoped(with_scratch, pltpu.SMEM((blocks.size,), jnp.int32), pltpu.SemaphoreType.DMA)
