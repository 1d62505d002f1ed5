"""Pages on their way between the device and the host's memory.

A page is gathered from all layers into arrays of its own, which are then copied to ``pinned_host``
memory, and back in the same manner: the copy waits for no step, and steps wait only for the gather
or the scatter, which move a page within the device. On a CPU both memories are the same RAM.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from jax.stages import Lowered

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_manager import SINK_PAGE
from caching.paged_attention_cache import PagedAttentionCache
from engine.device_errors import DeviceError, device_errors
from engine.errors import ConfigurationError
from engine.mesh import COPY, DeviceMesh
from engine.step.backend import CACHE, Backend
from engine.step.commands import CopyPages
from engine.step.compilation import Program, lower
from engine.step.host_cache.host_budget import COPY_SIZES

logger = logging.getLogger(__name__)

GATHER = "gather pages"
"""(cache, pages i32[n]) -> n page contents."""
SCATTER = "scatter pages"
"""(cache, pages i32[n], n page contents) -> cache, which is donated."""
HOST_MEMORY = "pinned_host"

PageContents = list[Array]
"""A page's part of all layers: an array [layers, ...] for each shape that layers have."""


class CopyPrograms:
    """Programs over the pages of a pool, of which each device has its heads. Compiles nothing."""

    def __init__(self, backend: Backend, pool: PagedAttentionCacheMetaData, mesh: DeviceMesh) -> None:
        self._num_pages = pool.num_pages
        self._mesh = mesh
        self._cache = backend.abstract_cache(pool, mesh)

    def all(self) -> Iterator[Program]:
        """Those of every size."""
        for count in COPY_SIZES:
            yield Program(GATHER, count, partial(self._lower_gather, count))
            yield Program(SCATTER, count, partial(self._lower_scatter, count))

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

    def _gather(self, cache: PagedAttentionCache, pages: Array) -> list[PageContents]:
        """The contents of each of ``pages`` i32[n]."""
        layers = [self._by_page(layer) for layer in cache.layers]

        def gather_one(page: Array) -> PageContents:
            return [
                jnp.concatenate([jax.lax.dynamic_index_in_dim(layers[at], page, 1, False) for at in alike])
                for alike in _alike(layers)
            ]

        gathered = jax.lax.map(gather_one, pages)
        return [[contents[number] for contents in gathered] for number in range(pages.shape[0])]

    def _scatter(self, cache: PagedAttentionCache, pages: Array, contents: list[PageContents]) -> PagedAttentionCache:
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

        layers = [self._by_page(layer) for layer in cache.layers]
        placed = jax.lax.fori_loop(0, pages.shape[0], scatter_one, layers)
        return replace(
            cache,
            layers=tuple(layer.reshape(before.shape) for layer, before in zip(placed, cache.layers, strict=True)),
        )

    def _by_page(self, layers: Array) -> Array:
        """[layers, pages, ...] of an array whose layers come one after the other."""
        return layers.reshape(-1, self._num_pages, *layers.shape[1:])


def _alike(layers: list[Array]) -> list[list[int]]:
    """The places of arrays whose pages have equal shapes and dtypes, each kind in a list."""
    kinds: dict[Any, list[int]] = {}
    for at, layer in enumerate(layers):
        kinds.setdefault((layer.shape[2:], layer.dtype), []).append(at)
    return list(kinds.values())


class HostMemory:
    """This process's part of the pages in host memory, by slot, and the copies under way."""

    def __init__(self, program: Callable[[str, int], Any], mesh: DeviceMesh) -> None:
        self._program = program
        self._on_device = mesh.sharding(*CACHE)
        self._on_host = _host_sharding(self._on_device)
        self._slots: dict[int, PageContents] = {}
        self._storing: deque[list[PageContents]] = deque()
        self._fetching: deque[list[PageContents]] = deque()
        self._fetched: deque[list[PageContents]] = deque()

    def copy(self, cache: PagedAttentionCache, command: CopyPages) -> PagedAttentionCache:
        """Dispatch copies, in order; the cache with what has arrived. Waits for nothing."""
        stored = self._store(cache, command.stores)
        for pages in command.places:
            cache = self._place(cache, pages, self._fetched.popleft())
        if command.fetches:
            fetched = jax.device_put([self._slots[slot] for slot in command.fetches], self._on_device)
            self._fetching.append(fetched)
            self._fetched.append(fetched)
        if stored:
            self._storing.append(stored)
        return cache

    def take_landed(self) -> tuple[int, int]:
        """How many lists of stores and of fetches have arrived since the last call, the oldest."""
        return _take_ready(self._storing), _take_ready(self._fetching)

    @property
    def is_copying(self) -> bool:
        """Whether any have not been taken."""
        return bool(self._storing or self._fetching)

    def wait(self) -> None:
        """Until the oldest fetch has arrived; the oldest store where there is none."""
        try:
            with device_errors():
                jax.block_until_ready((self._fetching or self._storing)[0])
        except DeviceError as error:
            logger.error(
                "a copy between the device and the host failed (%s): a step that reads it will fail too", error
            )

    def clear(self) -> None:
        """Forget everything, under way too."""
        for pages in (self._storing, self._fetching, self._fetched, self._slots):
            pages.clear()

    def _store(self, cache: PagedAttentionCache, stores: list[tuple[int, int]]) -> list[PageContents]:
        gathered: list[PageContents] = []
        for some, size in _calls([page for page, _ in stores]):
            gathered += self._program(GATHER, size)(cache, some)[: len(stores) - len(gathered)]
        stored: list[PageContents] = jax.device_put(gathered, self._on_host)
        self._slots.update({slot: contents for (_, slot), contents in zip(stores, stored, strict=True)})
        return stored

    def _place(self, cache: PagedAttentionCache, pages: list[int], contents: list[PageContents]) -> PagedAttentionCache:
        at = 0
        for some, size in _calls(pages):
            arrived = contents[at : at + size]
            arrived += arrived[-1:] * (size - len(arrived))
            cache = self._program(SCATTER, size)(cache, some, arrived)
            at += size
        return cache


def copy_seconds(num_bytes: int, count: int = COPY_SIZES[-1]) -> float:
    """Seconds in which ``num_bytes`` of one device come from the host: measured now, the best of
    three times ``count``."""
    device = jax.local_devices()[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    pages = jax.device_put([np.zeros(num_bytes, np.uint8)] * count, _host_sharding(on_device))
    times = []
    for _ in range(3):
        jax.block_until_ready(pages)
        begun = time.perf_counter()
        jax.block_until_ready(jax.device_put(pages, on_device))
        times.append(time.perf_counter() - begun)
    return min(times) / count


def _host_sharding(sharding: Sharding) -> Sharding:
    """Raises ConfigurationError if the devices' runtime has no such memory."""
    for device in cast("set[Any]", sharding.addressable_devices):  # jax's types lack its memories
        if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
            raise ConfigurationError(
                f"host_cache_gib needs memory of the kind {HOST_MEMORY}, which {device.device_kind} does not offer: leave it out"
            )
    return sharding.with_memory_kind(HOST_MEMORY)


def _take_ready(lists: deque[list[PageContents]]) -> int:
    count = 0
    while lists and all(leaf.is_ready() for leaf in jax.tree.leaves(lists[0])):
        lists.popleft()
        count += 1
    return count


def _calls(pages: list[int]) -> Iterator[tuple[np.ndarray, int]]:
    """The pages i32[n] of each call, padded, and n."""
    at = 0
    while at < len(pages):
        left = len(pages) - at
        size = next((size for size in COPY_SIZES if size >= left), COPY_SIZES[-1])
        numbers = np.full(size, SINK_PAGE, np.int32)
        numbers[: min(size, left)] = pages[at : at + size]
        yield numbers, size
        at += size
