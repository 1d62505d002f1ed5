"""Ragged paged attention on a TPU by our own Pallas kernel, which also writes the step's pages.

The idea is Kwon et al. 2023; the names are those of jax's own kernel and of tpu-inference's. One
call writes all new keys and values to their pages (caching/tpu/pallas_writes.py), then attends
(caching/tpu/pallas_rows.py): rows of a single query one by one, other rows a tile of queries at a
time. It also runs in Pallas' interpreter, where tests compare it with plain attention.
"""

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
from caching.tpu.jax_attention import OWN_SCALARS_BYTES, SCALAR_MEMORY_BYTES, VMEM_LIMIT_BYTES, block_pages
from caching.tpu.pallas_geometry import LANES, SUBLANES, Geometry, Ref, Table, granule, piece
from caching.tpu.pallas_rows import Rows
from caching.tpu.pallas_writes import replicated, write_rows
from caching.tpu.tpu_chip import Chip

TILE_ROWS = 256
"""Queries of a tile times query heads per kv head."""


def stored_heads(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    """The kv_heads and head_dim of pages: a key and its value fill whole registers together."""
    del dtype
    return kv_heads, -(-2 * head_dim // LANES) * LANES // 2


def misfit(page_size: int, dtype: np.dtype, extras: str | None) -> str | None:
    """Why the kernel cannot read such pages; it has all extras."""
    del extras
    if is_scaled(dtype):
        return f"kv_cache_dtype {dtype} has a scale for each token"
    if page_size % granule(dtype):
        return f"page_size {page_size} is no multiple of {granule(dtype)}"
    return None


def holds_table(rows: int, pages_per_seq: int) -> bool:
    """Whether the page table and the lengths of so many rows fit, 4 bytes an entry."""
    return 4 * (rows * (pages_per_seq + 2) + 3) <= SCALAR_MEMORY_BYTES - OWN_SCALARS_BYTES


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
        pages_per_seq = table.page_indices.shape[1]
        return Geometry(
            tokens=q.shape[0],
            kv_heads=kv_heads,
            group=q.shape[1] // kv_heads,
            page_size=page_size,
            pages_per_seq=pages_per_seq,
            width=width,
            block_pages=block_pages(self.chip, kv_pages, pages_per_seq),
            dtype=np.dtype(kv_pages.dtype),
        )

    def _call(
        self, geometry: Geometry, spec: AttentionSpec, view: CacheView, q: Array, new: Array | None, sinks: Array | None
    ) -> tuple[Array, Array]:
        kv_pages, table = view.pages, view.table
        q_lens = table.cu_q_lens[1:] - table.cu_q_lens[:-1]
        decodes = jnp.sum(jnp.cumprod((q_lens == 1).astype(jnp.int32)), dtype=jnp.int32)
        scalars = (
            table.kv_lens,
            table.page_indices.reshape(-1),
            table.cu_q_lens,
            jnp.concatenate([decodes[None], table.num_seqs]),
        )
        tile = _tile(geometry)
        arrays = [q] if new is None else [q, new]
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
    """Refs: 4 scalars, q, new tokens if any, sinks if any, pages, the pages as output, the result."""
    table, (q, *given, _, pages, out) = Table(*refs[:4]), refs[4:]
    decodes, rows = table.counts[0], table.counts[1]
    sinks = given[1:] if writes else given
    if writes:
        write_rows(geometry, table, given[0], pages)

    def attend(size: int, begin: Array, past: Array) -> None:
        mine = sinks[0].at[:, pl.ds(0, size * geometry.group)] if sinks else None
        Rows(geometry, spec, table, pages, q, out, mine, size, begin, past).attend()

    attend(1, jnp.int32(0), decodes)
    if geometry.tokens > 1:
        attend(tile, decodes, rows)
