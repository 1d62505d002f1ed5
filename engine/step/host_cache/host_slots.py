"""Pages and states on their way between the device and the host's memory.

A page is gathered from all layers into arrays of its own, which are then copied to ``pinned_host``
memory, and back in the same manner: the copy waits for no step, and steps wait only for the gather
or the scatter, which move a page within the device. On a CPU both memories are the same RAM.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding

from caching.paged_attention_cache import PagedAttentionCache
from engine.devices.device_errors import DeviceError, device_errors
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.scheduling.host_cache.copies import Copies
from engine.step.backend import CACHE
from engine.step.host_cache.host_budget import COPY_SIZES
from engine.step.host_cache.page_copies import Contents, Copied

logger = logging.getLogger(__name__)

HOST_MEMORY = "pinned_host"
GetProgram = Callable[[str, int], Any]
"""From a program's name and size to its executable."""


class UnderWay:
    """Lists of copies in one direction that have begun, the oldest first."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """From the beginning of each list until it was seen to have arrived, which is at the
        latest in the next step."""
        self._lists: deque[tuple[list[Contents], float]] = deque()

    def __len__(self) -> int:
        return len(self._lists)

    def begin(self, contents: list[Contents]) -> None:
        """One more list."""
        self._lists.append((contents, time.perf_counter()))

    def take_landed(self) -> int:
        """How many lists have arrived since the last call."""
        count = 0
        while self._lists and all(leaf.is_ready() for leaf in jax.tree.leaves(self._lists[0][0])):
            self.seconds += time.perf_counter() - self._lists.popleft()[1]
            count += 1
        return count

    def wait(self) -> None:
        """Until the oldest list has arrived."""
        jax.block_until_ready(self._lists[0][0])

    def clear(self) -> None:
        """Forget them."""
        self._lists.clear()


class HostSlots:
    """This process's part of what the host's slots hold, pages or states, and of its copies."""

    def __init__(self, program: GetProgram, copied: Copied, mesh: DeviceMesh) -> None:
        self.storing = UnderWay()
        """Copies to the host."""
        self.fetching = UnderWay()
        """Copies to the device."""
        self._program = program
        self._copied = copied
        self._on_device = mesh.sharding(*CACHE)
        self._on_host = _host_sharding(self._on_device)
        self._slots: dict[int, Contents] = {}
        self._fetched: deque[list[Contents]] = deque()

    def copy(self, cache: PagedAttentionCache, copies: Copies) -> PagedAttentionCache:
        """Dispatch copies, in order; the cache with what has arrived. Waits for nothing."""
        for pages in copies.places:
            cache = self._place(cache, pages, self._fetched.popleft())
        stored = self._store(cache, copies.stores)
        if copies.fetches:
            fetched = jax.device_put([self._slots[slot] for slot in copies.fetches], self._on_device)
            self.fetching.begin(fetched)
            self._fetched.append(fetched)
        if stored:
            self.storing.begin(stored)
        return cache

    def clear(self) -> None:
        """Forget everything, under way too."""
        for each in (self.storing, self.fetching, self._fetched, self._slots):
            each.clear()

    def _store(self, cache: PagedAttentionCache, stores: list[tuple[int, int]]) -> list[Contents]:
        gathered: list[Contents] = []
        for some, size in self._copied.calls([page for page, _ in stores]):
            gathered += self._program(self._copied.gather, size)(cache, some)[: len(stores) - len(gathered)]
        stored: list[Contents] = jax.device_put(gathered, self._on_host)
        self._slots.update({slot: contents for (_, slot), contents in zip(stores, stored, strict=True)})
        return stored

    def _place(self, cache: PagedAttentionCache, pages: list[int], contents: list[Contents]) -> PagedAttentionCache:
        at = 0
        for some, size in self._copied.calls(pages):
            arrived = contents[at : at + size]
            arrived += arrived[-1:] * (size - len(arrived))
            cache = self._program(self._copied.scatter, size)(cache, some, arrived)
            at += size
        return cache


class HostMemory:
    """This process's part of the tier: pages, and states in a model that has such."""

    def __init__(self, program: GetProgram, kinds: list[Copied], mesh: DeviceMesh) -> None:
        self.kinds = [HostSlots(program, copied, mesh) for copied in kinds]
        """First that of pages."""

    def copy(self, cache: PagedAttentionCache, copies: Copies) -> PagedAttentionCache:
        """As ``HostSlots.copy``."""
        return self.kinds[copies.of_states].copy(cache, copies)

    def take_landed(self) -> list[tuple[int, int]]:
        """By kind, how many lists of stores and of fetches have arrived since the last call."""
        return [(kind.storing.take_landed(), kind.fetching.take_landed()) for kind in self.kinds]

    @property
    def is_copying(self) -> bool:
        """Whether any have not been taken."""
        return any(len(kind.storing) + len(kind.fetching) for kind in self.kinds)

    @property
    def seconds_stored(self) -> float:
        """Of all copies to the host, which may run beside each other."""
        return sum(kind.storing.seconds for kind in self.kinds)

    @property
    def seconds_loaded(self) -> float:
        """Of all copies to the device."""
        return sum(kind.fetching.seconds for kind in self.kinds)

    def wait(self) -> None:
        """Until one of the oldest fetches has arrived; a store where there is none."""
        ways = [kind.fetching for kind in self.kinds] + [kind.storing for kind in self.kinds]
        try:
            with device_errors():
                next(way for way in ways if len(way)).wait()
        except DeviceError as error:
            logger.error(
                "a copy between the device and the host failed (%s): a step that reads it will fail too", error
            )

    def clear(self) -> None:
        """Forget everything, under way too."""
        for kind in self.kinds:
            kind.clear()


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
