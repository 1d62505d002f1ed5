"""The plain twin of the attention kernels, and how far a kernel is from it on this machine.

The twin is in numpy, and knows keys and values but no pages. A kernel gets three steps: two prompts,
a token of the first beside more of the second, and a token more of both. So pages that are written
in one step are read in the next, several to a row, by rows of both kinds. A kernel that reads
queries, keys and values together gets those of the last step so.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.attention.spec import AttentionInputs, AttentionKernel, AttentionSpec, CacheView, PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import as_read, as_stored, is_scaled
from caching.paged_attention_cache import PagedAttentionCache

Numbers = NDArray[Any]
"""Of any float dtype; sums are in float64."""
ROWS, PAGES_PER_SEQ = 3, 4
SPREAD = 3.0
"""Standard deviation of the scores. A few keys then have most of a query's weight, so that one
key too many or too few changes some results by about 1."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer on one device, and the dtype of its activations."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype
    sinks: bool = False


@dataclass(frozen=True)
class Row:
    """The tokens of a row in a step: ``count`` of them behind ``known`` ones, in these pages."""

    known: int
    count: int
    pages: tuple[int, ...]


def plain_attention(
    spec: AttentionSpec, q: Numbers, keys: Numbers, values: Numbers, sinks: Numbers | None = None
) -> Numbers:
    """[n, heads, head_dim] of the last n of keys and values [tokens, kv_heads, head_dim]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * spec.scale
    scores = scores if spec.soft_cap is None else spec.soft_cap * np.tanh(scores / spec.soft_cap)
    query, key = np.arange(len(keys) - len(q), len(keys))[:, None], np.arange(len(keys))
    seen = (key <= query) & (spec.window is None or key > query - spec.window)
    seen &= spec.chunk is None or key // spec.chunk == query // spec.chunk
    seen &= key >= np.minimum(query, spec.first)
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    out: Numbers = np.einsum("hqk,khd->qhd", weights / total, values)
    return out


def largest_error(
    kernel: AttentionKernel,
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache],
    one_page: PagedAttentionCacheMetaData,
    spec: AttentionSpec,
    heads: Heads,
) -> float:
    """The largest difference between a kernel and its twin; results are about 1, NaN is inf.

    ``one_page`` is the backend's pool of one page. Windows and chunks longer than a page are tried
    as one of a page and a half. Raises what the kernel raises.
    """
    size = one_page.page_size
    longest = size + size // 2
    window, chunk = (reach and min(reach, longest) for reach in (spec.window, spec.chunk))
    spec = replace(spec, window=window, chunk=chunk)
    first, second = 2 * size + 3, size - 1
    one, other = (3, 1, 5, 6), (2, 4)
    steps = (
        (Row(0, first, one), Row(0, second, other)),
        (Row(first, 1, one), Row(second, size, other)),
        (Row(first + 1, 1, one), Row(second + size, 1, other)),
    )
    pool = replace(one_page, num_layers=1, num_pages=7, stacked=False)
    trial = _Trial(kernel, spec, heads, pool.dtype, 4 * size)
    layer = jax.eval_shape(partial(allocate, pool)).layers[0]
    # allocated memory may hold what an earlier trial wrote, and so hide that a kernel writes nothing
    pages = jax.device_put(np.zeros(layer.shape, layer.dtype))
    error = 0.0
    for rows in steps:
        is_together = kernel.fuses_rotation and rows is steps[-1]
        pages, found = trial.step(pages, rows, is_together=is_together)
        error = max(error, found)
    return error


class _Trial:
    """The rows of one trial so far: their keys and values as pages hold them."""

    def __init__(
        self, kernel: AttentionKernel, spec: AttentionSpec, heads: Heads, kv_dtype: np.dtype, tokens: int
    ) -> None:
        self._kernel, self._spec, self._heads, self._kv_dtype, self._tokens = kernel, spec, heads, kv_dtype, tokens
        self._random = np.random.default_rng(0)
        empty = np.zeros((0, heads.kv_heads, heads.head_dim))
        self._known = [(empty, empty) for _ in range(ROWS)]
        self._sinks = self._random.standard_normal(heads.heads).astype(np.float32) if heads.sinks else None
        self._run = jax.jit(self._attend, donate_argnums=0)

    def step(self, pages: Array, rows: tuple[Row, ...], *, is_together: bool) -> tuple[Array, float]:
        """Run a step; returns the pages and the largest error of its results."""
        inputs, rotation = self._inputs()
        rotated = inputs if rotation is None else tuple(_rotated(x, *rotation) for x in inputs[:2]) + inputs[2:]
        together = _together(*inputs) if is_together else None
        pages, out = self._run(pages, _table(rows), inputs, rotation, self._sinks, together)
        results, error, begin = np.asarray(out, np.float64), 0.0, 0
        for number, row in enumerate(rows):
            here = slice(begin, begin + row.count)
            q, k, v = (np.asarray(x[here], np.float64) for x in (rotated[0], *map(self._held, rotated[1:])))
            keys, values = (np.concatenate(pair) for pair in zip(self._known[number], (k, v), strict=True))
            self._known[number] = keys, values
            difference = np.abs(results[here] - plain_attention(self._spec, q, keys, values, self._sinks)).max()
            error = max(error, float(difference) if np.isfinite(difference) else np.inf)
            begin += row.count
        return pages, error

    def _attend(
        self,
        pages: Array,
        table: PageTable,
        inputs: tuple[Array, Array, Array],
        rotation: tuple[Array, Array] | None,
        sinks: Array | None,
        together: Array | None,
    ) -> tuple[Array, Array]:
        return self._kernel(self._spec, CacheView(pages, table), AttentionInputs(*inputs, rotation, sinks, together))

    def _inputs(self) -> tuple[tuple[Numbers, ...], tuple[Numbers, Numbers] | None]:
        """q, k, v in the dtype of activations, and cosines and sines for a kernel that rotates."""
        heads, normal = self._heads, self._random.standard_normal
        q, k, v = (
            normal((self._tokens, count, heads.head_dim)) for count in (heads.heads, heads.kv_heads, heads.kv_heads)
        )
        q *= SPREAD / (self._spec.scale * heads.head_dim**0.5)
        inputs = tuple(x.astype(heads.dtype) for x in (q, k, v))
        if not self._kernel.fuses_rotation:
            return inputs, None
        angles = normal((self._tokens, 1, heads.head_dim // 2)).astype(np.float32)
        return inputs, (np.cos(angles), np.sin(angles))

    def _held(self, x: Numbers) -> Numbers:
        """Keys or values as they are read from pages."""
        if not is_scaled(self._kv_dtype):
            return x.astype(self._kv_dtype)
        return np.asarray(as_read(as_stored(jnp.asarray(x), self._kv_dtype), self._kv_dtype, np.dtype(np.float32)))


def _together(q: Numbers, k: Numbers, v: Numbers) -> Numbers:
    """See AttentionInputs."""
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return np.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)


def _rotated(x: Numbers, cos: Numbers, sin: Numbers) -> Numbers:
    first, second = np.split(x.astype(np.float32), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _table(rows: tuple[Row, ...]) -> PageTable:
    indices = np.zeros((ROWS, PAGES_PER_SEQ), np.int32)
    lens, queries = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    for number, row in enumerate(rows):
        indices[number, : len(row.pages)] = row.pages
        lens[number], queries[number] = row.known + row.count, row.count
    begins = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return PageTable(*jax.device_put((lens, indices, begins, np.array([len(rows)], np.int32))))
