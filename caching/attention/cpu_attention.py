"""Ragged paged attention on a CPU, by a C++ kernel of our own that reads the pages in place.

A page has one head's keys as [head_dim, page_size] and its values as [page_size, head_dim], each
in the memory that ``PagedAttentionCache`` declares as [page_size, head_dim].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import jax
import numpy as np
from jax import Array

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView
from caching.cpu_kernels import ATTENTION, load, register
from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache

DTYPES = ("float32", "bfloat16")
"""Dtypes of pages that the kernel reads."""


@cache
def vector_width() -> int:
    """The unit of page_size and head_dim. Registers the kernel. Raises KernelsUnavailable."""
    library = load(ATTENTION)
    for name in ("odriver_attention", "odriver_untouched"):
        register(library, name)
    return int(library.odriver_vector_width())


def allocate(metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
    """Pages whose memory is committed at first use: to touch a GB takes a second."""
    untouched = _untouched(PagedAttentionCache.layer_struct(metadata))
    return PagedAttentionCache(tuple(untouched() for _ in range(metadata.num_layers)))


@cache
def _untouched(layer: jax.ShapeDtypeStruct) -> Callable[[], Array]:
    """Compiled once, so that pages can be allocated again while serving."""
    return jax.jit(jax.ffi.ffi_call("odriver_untouched", layer))


@dataclass(frozen=True)
class CPUAttention:
    """Attention by the C++ kernel over pages of float32, or of bfloat16 stored as uint16."""

    fuses_rotation: ClassVar[bool] = True

    def __call__(self, spec: AttentionSpec, view: CacheView, inputs: AttentionInputs) -> tuple[Array, Array]:
        """See AttentionKernel.

        The result is f32 like q, and 0 for padding. A query's result is the same to the bit
        whatever the other rows are and however its prompt was cut into chunks.
        """
        assert inputs.rotation is not None
        pages, table = view.pages, view.table
        nothing = np.zeros(0, np.float32)
        heads = (inputs.q, inputs.k, inputs.v) if inputs.together is None else (inputs.together, None, None)
        *arrays, sinks = (nothing if x is None else x for x in (*heads, inputs.sinks))
        call = jax.ffi.ffi_call(
            "odriver_attention",
            (jax.ShapeDtypeStruct(pages.shape, pages.dtype), jax.ShapeDtypeStruct(inputs.q.shape, np.float32)),
            input_output_aliases={0: 0},
        )
        written, out = call(
            pages,
            *(x.astype(np.float32) for x in (*arrays, *inputs.rotation, sinks)),
            table.kv_lens,
            table.page_indices,
            table.cu_q_lens,
            table.num_seqs,
            scale=np.float32(spec.scale),
            window=np.int64(spec.window or 0),
            chunk=np.int64(spec.chunk or 0),
            first=np.int64(spec.first),
            soft_cap=np.float32(spec.soft_cap or 0),
        )
        return written, out
