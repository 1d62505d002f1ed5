"""What copies between the device and the host do, where a page's contents are a few numbers."""

from collections import deque
from typing import Any

from engine.scheduling.host_cache.copies import Copies


class SimulatedHost:
    """Host memory, and what is on its way from it, beside the ``content`` of the device's pages.

    ``content`` is by page and place in it. Whatever nobody has written yet is None, also in a copy.
    """

    def __init__(self, content: dict[tuple[int, int], Any], page_size: int) -> None:
        self._content = content
        self._page_size = page_size
        self._slots: dict[int, list[Any]] = {}
        self._fetched: deque[list[list[Any]]] = deque()
        self.stores = self.fetches = 0
        """Lists of copies that have not landed."""

    def run(self, copies: Copies) -> None:
        """As the device does: what has arrived is written first, then what is stored is read."""
        places = range(self._page_size)
        for pages in copies.places:
            for page, contents in zip(pages, self._fetched.popleft(), strict=True):
                self._content.update({(page, place): contents[place] for place in places})
        for page, slot in copies.stores:
            self._slots[slot] = [self._content.get((page, place)) for place in places]
        if copies.fetches:
            self._fetched.append([self._slots[slot] for slot in copies.fetches])
        self.stores += bool(copies.stores)
        self.fetches += bool(copies.fetches)

    def lose_copies(self) -> None:
        """Everything on the host is lost."""
        self._slots.clear()
        self._fetched.clear()
        self.stores = self.fetches = 0
