"""What full pages hold, so that the next sequence to begin with the same tokens need not compute them. Numbers only.

A page is known by a key over its own tokens and all before them, so one key stands for a whole beginning. Keys of
different salts never meet: whoever must not learn what others asked has a salt of their own.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

KEY_BYTES = 16
"""Enough that no two beginnings share a key by accident, nor by design: blake2b is a cryptographic hash."""


def page_keys(previous: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of the full pages that ``token_ids`` make, after the page with key ``previous``, or after a salt."""
    tokens = array("i", token_ids)
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size].tobytes()
        previous = blake2b(previous + page, digest_size=KEY_BYTES).digest()
        keys.append(previous)
    return keys


class PrefixCache:
    """Which page holds which key. Of the pages that nobody owns, the one let go longest ago is given away first.

    HBMPageManager says who is owned. Times are in seconds, and the caller's.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept_at: dict[int, float] = {}
        self._unowned: OrderedDict[int, float] = OrderedDict()
        """When each was let go, oldest first."""
        self.evictions = 0
        self.lifetime_seconds = 0.0
        """Of evicted pages: from when they were filled."""
        self.idle_seconds = 0.0
        """Of evicted pages: since their last owner let go."""

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def num_unowned(self) -> int:
        """Pages that hold something and have no owner."""
        return len(self._unowned)

    def holder(self, key: bytes) -> int | None:
        """The page that holds what the key stands for, if there is one."""
        return self._page_of.get(key)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of keys from the first on."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def keep(self, page: int, key: bytes, now: float) -> None:
        """An owned page now holds this; of two pages with the same contents the first is the one to be found."""
        if page not in self._key_of and self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key
            self._kept_at[page] = now

    def let_go(self, page: int, now: float) -> None:
        """A kept page has lost its last owner."""
        self._unowned[page] = now

    def claim(self, page: int) -> None:
        """An unowned page has got an owner."""
        del self._unowned[page]

    def evict(self, now: float) -> int:
        """Forget what the page holds that was let go longest ago, and return it."""
        page, since = next(iter(self._unowned.items()))
        self.evictions += 1
        self.lifetime_seconds += now - self._kept_at[page]
        self.idle_seconds += now - since
        self.forget(page)
        return page

    def forget(self, page: int) -> bool:
        """The page is not to be found any more; whether nobody owns it."""
        del self._page_of[self._key_of.pop(page)], self._kept_at[page]
        return self._unowned.pop(page, None) is not None

    def pages(self) -> list[int]:
        """All that hold something."""
        return list(self._key_of)
