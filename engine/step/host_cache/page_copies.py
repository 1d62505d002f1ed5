"""What gathers pages and states from all layers into arrays of their own, and puts them back.

Such arrays go to the host's memory and come back (engine/step/host_cache/host_slots.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Lowered

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_manager import SINK_PAGE
from caching.paged_attention_cache import PagedAttentionCache
from engine.devices.mesh import COPY, DeviceMesh
from engine.step.backend import CACHE, Backend
from engine.step.compilation import Program, lower
from engine.step.host_cache.host_budget import HostBudget

Contents = list[Array]
"""A page's part of all layers: an array [layers, ...] for each shape that layers have."""


@dataclass(frozen=True)
class Copied:
    """What goes to the host's memory and comes back: pages, or recurrent states.

    Where they are states, what is called a page here is a slot.
    """

    what: str
    num_pages: int
    """Of the device, for each layer."""
    sizes: tuple[int, ...]
    """Pages of a call, ascending."""
    of_states: bool = False

    @property
    def gather(self) -> str:
        """The program (cache, pages i32[n]) -> n page contents."""
        return f"gather {self.what}"

    @property
    def scatter(self) -> str:
        """The program (cache, pages i32[n], n page contents) -> cache, which is donated."""
        return f"scatter {self.what}"

    def arrays(self, cache: PagedAttentionCache) -> list[Array]:
        """[layers * pages, ...] each, by layer or by stack of layers."""
        return jax.tree.leaves(cache.states if self.of_states else (cache.layers, cache.draft))

    def placed(self, cache: PagedAttentionCache, arrays: list[Array]) -> PagedAttentionCache:
        """The cache with these ``arrays``."""
        if not self.of_states:
            count = len(cache.layers)
            return replace(cache, layers=tuple(arrays[:count]), draft=tuple(arrays[count:]))
        return replace(cache, states=jax.tree.unflatten(jax.tree.structure(cache.states), arrays))

    def calls(self, pages: list[int]) -> Iterator[tuple[np.ndarray, int]]:
        """The pages i32[n] of each call, padded with the sink, and n."""
        at = 0
        while at < len(pages):
            left = len(pages) - at
            size = next((size for size in self.sizes if size >= left), self.sizes[-1])
            numbers = np.full(size, SINK_PAGE, np.int32)
            numbers[: min(size, left)] = pages[at : at + size]
            yield numbers, size
            at += size


def copied_kinds(pool: PagedAttentionCacheMetaData, host: HostBudget | None) -> list[Copied]:
    """What a tier holds: pages first, then states if the model has such; nothing without a tier."""
    if host is None:
        return []
    pages = Copied("pages", pool.num_pages, host.copy_sizes)
    if pool.states is None or host.states is None:
        return [pages]
    return [pages, Copied("states", pool.states.num_slots, host.states.copy_sizes, of_states=True)]


class CopyPrograms:
    """Programs over the pages of a pool, of which each device has its heads. Compiles nothing."""

    def __init__(self, backend: Backend, pool: PagedAttentionCacheMetaData, mesh: DeviceMesh, copied: Copied) -> None:
        self._copied = copied
        self._mesh = mesh
        self._cache = backend.abstract_cache(pool, mesh)

    def all(self) -> Iterator[Program]:
        """Those of every size."""
        for count in self._copied.sizes:
            yield Program(self._copied.gather, count, partial(self._lower_gather, count))
            yield Program(self._copied.scatter, count, partial(self._lower_scatter, count))

    def _lower_gather(self, count: int) -> Lowered:
        on_each = self._mesh.on_each(self._gather, (CACHE, COPY), CACHE)
        return lower(on_each, self._cache, self._numbers(count))

    def _lower_scatter(self, count: int) -> Lowered:
        on_each = self._mesh.on_each(self._scatter, (CACHE, COPY, CACHE), CACHE)
        gathered = jax.eval_shape(
            self._mesh.on_each(self._gather, (CACHE, COPY), CACHE), self._cache, self._numbers(count)
        )
        return lower(on_each, self._cache, self._numbers(count), self._mesh.shapes(gathered, *CACHE), donate=0)

    def _numbers(self, count: int) -> Any:
        return self._mesh.shapes(jax.ShapeDtypeStruct((count,), np.int32))

    def _gather(self, cache: PagedAttentionCache, pages: Array) -> list[Contents]:
        """The contents of each of ``pages`` i32[n]."""
        layers = [self._by_page(layer) for layer in self._copied.arrays(cache)]

        def gather_one(page: Array) -> Contents:
            return [
                jnp.concatenate([jax.lax.dynamic_index_in_dim(layers[at], page, 1, False) for at in alike])
                for alike in _alike(layers)
            ]

        gathered = jax.lax.map(gather_one, pages)
        return [[contents[number] for contents in gathered] for number in range(pages.shape[0])]

    def _scatter(self, cache: PagedAttentionCache, pages: Array, contents: list[Contents]) -> PagedAttentionCache:
        """The cache with these contents in ``pages`` i32[n]. In place: one page after the other."""
        stacks = [jnp.stack(stack) for stack in zip(*contents, strict=True)]

        def scatter_one(number: Array, layers: list[Array]) -> list[Array]:
            for stack, alike in zip(stacks, _alike(layers), strict=True):
                page = jax.lax.dynamic_index_in_dim(stack, number, 0, False)
                first = 0
                for at in alike:
                    part = page[first : first + layers[at].shape[0], None]
                    first += layers[at].shape[0]
                    layers[at] = jax.lax.dynamic_update_slice_in_dim(layers[at], part, pages[number], 1)
            return layers

        layers = [self._by_page(layer) for layer in self._copied.arrays(cache)]
        placed = jax.lax.fori_loop(0, pages.shape[0], scatter_one, layers)
        return self._copied.placed(cache, [layer.reshape(-1, *layer.shape[2:]) for layer in placed])

    def _by_page(self, layers: Array) -> Array:
        """[layers, pages, ...] of an array whose layers come one after the other."""
        return layers.reshape(-1, self._copied.num_pages, *layers.shape[1:])


def _alike(layers: list[Array]) -> list[list[int]]:
    """The places of arrays whose pages have equal shapes and dtypes, each kind in a list."""
    kinds: dict[Any, list[int]] = {}
    for at, layer in enumerate(layers):
        kinds.setdefault((layer.shape[2:], layer.dtype), []).append(at)
    return list(kinds.values())
