"""The owners of each page, and the contents of pages without owners. No device memory here."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from caching.host_tier import HostTier
from caching.prefix_cache import PrefixCache

SINK_PAGE = 0
"""Padding rows and tokens write here; it is never allocated."""
SINK_SLOT = SINK_PAGE
"""The same of the slots of recurrent states, whose owners another HBMPageManager counts."""


class Found(NamedTuple):
    """How many pages from a chain's first key on are known, and how many of those have owners."""

    held: int = 0
    owned: int = 0


NOTHING_FOUND = Found()


class HBMPageManager:
    """Allocates pages 1..num_pages-1, counts their owners, and frees them with the last one.

    Call ``can_alloc(n)`` before ``alloc(n)``: the scheduler handles a shortage, and only a caller
    that did not ask gets an error. A page may have several owners (``share``).

    A page with kept contents (``keep``) is found again even without an owner: it is *cached*
    until ``alloc`` finds no free page and evicts it, to the ``tier`` in host memory if there is one.
    The caller sets ``now``, in seconds.
    """

    def __init__(self, num_pages: int, tier: HostTier | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the sink and at least one page, not {num_pages} pages")
        self._free = list(range(num_pages - 1, SINK_PAGE, -1))
        self._owners = [0] * num_pages
        self.cache = PrefixCache(tier)
        """What pages hold; others read its counts alone."""
        self.tier = tier
        self.now = 0.0

    @property
    def num_total(self) -> int:
        """Pages that can be owned."""
        return len(self._owners) - 1

    @property
    def num_free(self) -> int:
        """Pages that have no owner and no kept contents."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that have no owner and can still be found."""
        return self.cache.num_unowned

    @property
    def num_owned(self) -> int:
        """Pages that have an owner, each counted once."""
        return self.num_total - self.num_free - self.num_cached

    def can_alloc(self, count: int) -> bool:
        """Whether ``count`` pages are free or cached."""
        return count <= len(self._free) + self.cache.num_unowned

    def alloc(self, count: int) -> list[int]:
        """``count`` pages, each with one owner. Ask ``can_alloc`` first."""
        assert count >= 0 and self.can_alloc(count), f"{count} pages asked of too few: can_alloc first"
        pages = [self._free.pop() if self._free else self.cache.evict(self.now) for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of a chain of keys. Share them before you allocate."""
        return self.cache.find(keys)

    def is_kept(self, key: bytes) -> bool:
        """Whether a page has this key."""
        return self.cache.holder(key) is not None

    def recount(self, keys: Sequence[bytes], count: int, last: Found) -> Found:
        """The result of ``find`` for the first ``count`` keys, updated from the last result.

        The cost is that of the change. A chain that has lost a page in its middle may be wrong: as
        a rule chains are evicted from the end, and owners own all pages before theirs.
        """
        held, owned = min(last.held, count), last.owned
        while held and self.cache.holder(keys[held - 1]) is None:
            held -= 1
        while held < count and self.cache.holder(keys[held]) is not None:
            held += 1
        owned = min(owned, held)
        while owned and not self._is_owned(keys[owned - 1]):
            owned -= 1
        while owned < held and self._is_owned(keys[owned]):
            owned += 1
        return Found(held, owned)

    def _is_owned(self, key: bytes) -> bool:
        page = self.cache.holder(key)
        return page is not None and self._owners[page] > 0

    def num_unowned(self, pages: Iterable[int]) -> int:
        """How many of these cached or owned pages ``share`` would take from ``alloc``."""
        return sum(not self._owners[page] for page in pages)

    def num_exclusive(self, pages: Iterable[int]) -> int:
        """How many of these pages have one owner."""
        return sum(self._owners[page] == 1 for page in pages)

    def share(self, pages: Iterable[int]) -> int:
        """One more owner for each of these owned or cached pages; how many had one."""
        owned = 0
        for page in pages:
            if self._owners[page]:
                owned += 1
            else:
                assert page in self.cache, f"page {page} is free and cannot be shared"
                self.cache.claim(page)
            self._owners[page] += 1
        return owned

    def keep(self, page: int, key: bytes) -> None:
        """This owned page has the contents of the key from now on, and is not written again."""
        assert self._owners[page] > 0, f"page {page} has no owner who could have filled it"
        self.cache.keep(page, key, self.now)

    def evict_first(self, key: bytes) -> None:
        """The page of this key is evicted before all others, if it has one that nobody owns."""
        page = self.cache.holder(key)
        if page is not None and not self._owners[page]:
            self.cache.evict_first(page)

    def free(self, pages: Iterable[int]) -> int:
        """Remove an owner from each of these pages; the last frees it. Free a chain's end first.

        Cached pages are evicted in the order of their return, and a chain needs its beginning.
        Returns how many still have an owner.
        """
        owned = 0
        for page in pages:
            assert page != SINK_PAGE and self._owners[page] > 0, f"page {page} has no owner to free it"
            self._owners[page] -= 1
            if self._owners[page]:
                owned += 1
            elif page in self.cache:
                self.cache.let_go(page, self.now)
            else:
                self._free.append(page)
        return owned

    def forget(self, pages: Iterable[int]) -> None:
        """These pages are not found any more, whether or not they have owners."""
        for page in pages:
            if page in self.cache and self.cache.forget(page):
                self._free.append(page)

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """These keys are not found any more, whether or not their pages have owners; nor in the tier."""
        holders = [self.cache.holder(key) for key in keys]
        self.forget([page for page in holders if page is not None])
        if self.tier is not None:
            self.tier.forget(keys)

    def forget_all(self) -> int:
        """No page is found any more: the memory was dropped, or the weights have changed.

        Returns how many could be.
        """
        pages = self.cache.pages()
        self.forget(pages)
        return len(pages)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that free + cached + owned is the pool; ``owned`` has a page per owner."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert SINK_PAGE not in free, "the sink is in the free list"
        expected = Counter(owned)
        actual = {page: owners for page, owners in enumerate(self._owners) if owners}
        assert dict(expected) == actual, f"owners are {dict(expected)}, counted are {actual}"
        kept = set(self.cache.pages())
        assert free.isdisjoint(actual), f"pages {free & set(actual)} are free and owned"
        assert free.isdisjoint(kept), f"pages {free & kept} are free and can be found"
        assert len(kept - set(actual)) == self.num_cached, "a page is cached and owned"
        assert len(free) + len(actual) + self.num_cached == self.num_total, "a page is lost"
