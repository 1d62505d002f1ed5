"""The plain twins that attention is held against: of kernels over pages, and of a decoder over whole rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, LatentInputs, LatentSpec, PageTable
from caching.page_manager import SINK_PAGE
from engine.models.step_context import LayerCache, Place


def padded_table(q_lens: Sequence[int], kv_lens: Sequence[int], page_indices: NDArray[np.int32]) -> PageTable:
    """Of rows with so many queries and tokens; ``page_indices`` has as many rows as the step, and the last are of nobody."""
    padding = len(page_indices) - len(q_lens)
    return PageTable(
        kv_lens=jnp.asarray([*kv_lens, *[0] * padding], jnp.int32),
        page_indices=jnp.asarray(page_indices),
        cu_q_lens=jnp.asarray([0, *np.cumsum(q_lens), *[sum(q_lens)] * padding], jnp.int32),
        num_seqs=jnp.asarray([len(q_lens)], jnp.int32),
    )


def plain_attention(
    spec: AttentionSpec, view: CacheView, inputs: AttentionInputs
) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """Pages [num_pages, kv_heads, 2, page_size, head_dim] as written, and f64[real tokens, heads, head_dim].

    One row after the other, without blocks or a running softmax.
    """
    table, pages = view.table, np.array(view.pages)
    cu_q_lens, kv_lens, page_indices = (np.asarray(x) for x in (table.cu_q_lens, table.kv_lens, table.page_indices))
    new = np.asarray(jnp.stack([jnp.asarray(inputs.k), jnp.asarray(inputs.v)], axis=2).astype(pages.dtype))
    q, page_size = np.float64(inputs.q), pages.shape[3]
    sinks = -np.inf if inputs.sinks is None else np.float64(inputs.sinks)[:, None]
    rows = range(int(table.num_seqs[0]))
    for row in rows:
        for token in range(cu_q_lens[row], cu_q_lens[row + 1]):
            position = kv_lens[row] - cu_q_lens[row + 1] + token
            pages[page_indices[row, position // page_size], :, :, position % page_size] = new[token]
    outputs = []
    for row in rows:
        begin, past, kv_len = cu_q_lens[row], cu_q_lens[row + 1], kv_lens[row]
        stored = np.concatenate(np.float64(pages[page_indices[row]]), axis=2)[:, :, :kv_len]
        keys, values = np.moveaxis(stored.repeat(q.shape[1] // stored.shape[0], axis=0), 1, 0)
        scores = np.einsum("qhd,hkd->hqk", q[begin:past], keys) * spec.scale
        scores = scores if spec.soft_cap is None else spec.soft_cap * np.tanh(scores / spec.soft_cap)
        query, key = np.arange(kv_len - (past - begin), kv_len)[:, None], np.arange(kv_len)
        seen = (key <= query) & (spec.window is None or key > query - spec.window)
        seen &= spec.chunk is None or key // spec.chunk == query // spec.chunk
        seen &= key >= np.minimum(query, spec.first)
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(-1) + np.exp(sinks)
        outputs.append(np.einsum("hqk,hkd->qhd", weights / total[..., None], values))
    return pages, np.concatenate(outputs)


def expanded(latents: Array, projections: Array, nope: int) -> tuple[Array, Array]:
    """Keys and values f[..., heads, nope + rope] of latents f[..., rank + rope], by f[heads, nope + v, rank].

    Keys and values have zeros behind them where the others are longer.
    """
    rank, heads = projections.shape[2], projections.shape[0]
    own = jnp.einsum("...r,hnr->...hn", latents[..., :rank], projections)
    shared = jnp.broadcast_to(latents[..., None, rank:], (*latents.shape[:-1], heads, latents.shape[-1] - rank))
    both = jnp.concatenate([own[..., :nope], shared], axis=-1), own[..., nope:]
    width = max(x.shape[-1] for x in both)
    keys, values = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) for x in both)
    return keys, values


def without_what_windows_have_passed(spec: AttentionSpec, view: CacheView) -> CacheView:
    """The same step where each row has given back the pages that none of its queries sees: the sink stands for them."""
    table, page_size = view.table, view.pages.shape[3]
    firsts = np.asarray(spec.first_seen(jnp.maximum(table.kv_lens - jnp.diff(table.cu_q_lens), 0)))
    passed = np.arange(table.page_indices.shape[1]) < firsts[:, None] // page_size
    return replace(view, table=replace(table, page_indices=jnp.where(passed, SINK_PAGE, table.page_indices)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseAttention:
    """Causal attention over whole rows [batch, length, heads, head_dim], a StepAttention."""

    keeps: bool = field(default=False, metadata={"static": True})
    """Whether a layer's cache has, by group, the keys and values that later layers may read."""
    fuses_rotation: ClassVar[bool] = False

    def __call__(
        self, spec: AttentionSpec, cache: LayerCache, place: Place, inputs: AttentionInputs
    ) -> tuple[LayerCache, Array]:
        """Each query sees the last ``window`` keys, its own included."""
        if isinstance(spec, LatentSpec):
            return self._of_latents(spec, cache, place, inputs)
        written = cache[place.group] if inputs.k is None else (inputs.k, inputs.v)
        q, group = inputs.q, inputs.q.shape[2] // written[0].shape[2]
        keys, values = (jnp.repeat(x, group, axis=2) for x in written)
        positions = np.arange(q.shape[1])
        distance = positions[:, None] - positions
        chunks = positions // (spec.chunk or len(positions))
        visible = (distance >= 0) & (distance < (spec.window or len(positions))) & (chunks[:, None] == chunks)
        visible &= positions >= np.minimum(positions[:, None], spec.first)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        scores = jnp.where(visible[None, None], scores, -jnp.inf)
        if inputs.sinks is not None:
            sinks = jnp.broadcast_to(inputs.sinks.astype(scores.dtype)[None, :, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(positions)]
        return {**(cache or {}), place.group: written} if self.keeps else cache, jnp.einsum(
            "bhqk,bkhd->bqhd", weights, values
        )

    def _of_latents(
        self, spec: LatentSpec, cache: LayerCache, place: Place, inputs: LatentInputs
    ) -> tuple[LayerCache, Array]:
        nope = inputs.q.shape[-1]
        k, v = expanded(inputs.latents, inputs.projections.base, nope)
        q = jnp.concatenate([inputs.q, inputs.q_rotated], axis=-1)
        q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, k.shape[-1] - q.shape[-1])])
        cache, attended = self(AttentionSpec(spec.scale, first=spec.first), cache, place, AttentionInputs(q, k, v))
        return cache, attended[..., : inputs.projections.base.shape[1] - nope]
