"""Which page table each layer reads, and where in a page its keys and values are, or its state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from engine.models.layers.mixer import Cached, OfLayer, OfModel, State
from engine.models.spec import BlockSpec

MOST_GROUPS = 8
"""Page tables that a model's layers have at most: a sequence takes a page at a time in each."""
WINDOWS_SHARE = 1 / 8
"""What a layer with a window counts beside one without: contexts of eight windows."""


class CachePlace(NamedTuple):
    """Where a layer's mixer finds its keys and values, or its state."""

    group: int
    """Its page table; 0 for a state."""
    layer: int
    """Which of the layers that a page holds, or of those that have a state."""
    is_state: bool = False


NO_PLACE = CachePlace(0, 0)
"""Of a layer that reads another model's."""


@dataclass(frozen=True)
class CacheLayout:
    """The layers of a model in groups of ``num_layers``, each with a page table of its own."""

    places: tuple[tuple[CachePlace, ...], ...]
    """Of each layer of the model, one for each of its mixers."""
    windows: tuple[int | None, ...]
    """By group, the tokens that its layers see; None is all."""
    num_layers: int
    """Layers that a page holds. Groups with fewer leave the rest of their pages empty."""
    states: tuple[State, ...]
    """Of each layer that has one."""

    def in_pages(self, layer: int) -> CachePlace:
        """Where a layer finds its keys and values."""
        return next(place for place in self.places[layer] if not place.is_state)

    def array(self, place: CachePlace, *, stacked: bool) -> int:
        """The number of a layer's cache: pages come first, then states.

        If ``stacked``, all pages are one, and all states.
        """
        if stacked:
            return int(place.is_state and self.num_layers > 0)
        return place.layer + (self.num_layers if place.is_state else 0)


@cache
def cache_layout(blocks: tuple[BlockSpec, ...], *, keeps_all: bool = False) -> CacheLayout:
    """The layout with which long sequences take the least memory, in as few groups as that takes.

    If it ``keeps_all``, layers with windows keep all tokens as the others do.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in _windows(blocks).items():
        kinds.setdefault(None if keeps_all else window, []).append(layer)
    states = {layer: cached for layer, cached in _each(blocks) if isinstance(cached, State)}
    ordered = sorted(kinds, key=lambda window: -(window or 2**62))
    size = _group_size({window: len(layers) for window, layers in kinds.items()})
    of_states = {layer: CachePlace(0, number, is_state=True) for number, layer in enumerate(states)}
    in_pages: dict[int, CachePlace] = {}
    windows: list[int | None] = []
    for window in ordered:
        for number, layer in enumerate(kinds[window]):
            in_pages[layer] = CachePlace(len(windows) + number // size, number % size)
        windows += [window] * -(-len(kinds[window]) // size)
    places: list[list[CachePlace]] = [[] for _ in blocks]
    for layer, cached in _each(blocks):
        in_page = in_pages.get(_source(layer, cached), NO_PLACE)
        places[layer].append(of_states[layer] if isinstance(cached, State) else in_page)
    return CacheLayout(tuple(map(tuple, places)), tuple(windows), size, tuple(states.values()))


def _each(blocks: Sequence[BlockSpec]) -> Iterator[tuple[int, Cached]]:
    """What each mixer caches, with its layer."""
    for layer, block in enumerate(blocks):
        for mixer in block.mixers:
            yield layer, mixer.cached


def _windows(blocks: Sequence[BlockSpec]) -> dict[int, int | None]:
    """By layer that has keys and values, how many of them are read: by itself, or by another."""
    windows: dict[int, int | None] = {}
    for layer, cached in _each(blocks):
        if isinstance(cached, OfModel | State):
            continue
        source, window = _source(layer, cached), cached.reach
        before = windows.get(source, 0)
        windows[source] = None if before is None or window is None else max(before, window)
    return windows


def _source(layer: int, cached: Cached) -> int:
    return cached.layer if isinstance(cached, OfLayer) else layer


def _group_size(counts: dict[int | None, int]) -> int:
    """Layers of a group, for so many layers by window."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def cost(size: int) -> tuple[float, int]:
        memory = sum(
            -(-count // size) * size * (1 if window is None else WINDOWS_SHARE) for window, count in counts.items()
        )
        return memory, groups(size)

    most = max(counts.values(), default=0)
    sizes = (size for size in range(1, most + 1) if groups(size) <= MOST_GROUPS or size == most)
    return min(sizes, key=cost, default=0)
