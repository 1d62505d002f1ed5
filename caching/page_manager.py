"""Who owns which page. Numbers only: the memory behind them is PagedAttentionCache's."""

from collections import Counter
from collections.abc import Iterable

SINK_PAGE = 0
"""Rows and tokens that are only padding write here; it is never handed out."""


class HBMPageManager:
    """Hands out pages 1..num_pages-1, counts their owners, takes them back when the last one lets go.

    Ask ``can_alloc(n)``, then ``alloc(n)``: shortage is an answer for the scheduler to act on, and only a
    caller that did not ask fails. A page may have several owners (``share``).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the sink and at least one page, not {num_pages} pages")
        self._free = list(range(num_pages - 1, SINK_PAGE, -1))
        self._owners = [0] * num_pages

    @property
    def num_total(self) -> int:
        """Pages that can be owned."""
        return len(self._owners) - 1

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Pages somebody owns, each counted once."""
        return self.num_total - self.num_free

    def can_alloc(self, count: int) -> bool:
        """Whether ``count`` pages are free."""
        return count <= len(self._free)

    def alloc(self, count: int) -> list[int]:
        """``count`` pages, each with one owner. Ask ``can_alloc`` first."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free: can_alloc first"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of these owned pages."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be shared"
            self._owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One owner less for each of these pages; the last one gives it back."""
        for page in pages:
            assert page != SINK_PAGE and self._owners[page] > 0, f"page {page} has no owner to free it"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that free and owned make up the pool, and that ``owned``, a page per owner, is who owns them."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert SINK_PAGE not in free, "the sink is in the free list"
        expected = Counter(owned)
        actual = {page: owners for page, owners in enumerate(self._owners) if owners}
        assert dict(expected) == actual, f"owners are {dict(expected)}, counted are {actual}"
        assert free.isdisjoint(actual), f"pages {free & set(actual)} are free and owned"
        assert len(free) + len(actual) == self.num_total, "a page is lost"
