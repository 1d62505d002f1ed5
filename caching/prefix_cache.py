"""The contents of full pages, so that a sequence with a known prefix need not compute it again.

A page's key hashes its own tokens and all before them, so one key identifies a whole prefix. Keys
of different salts never match: requests that must not share a prefix have different salts. The
same tokens have another page, and so another key, in each group of layers (cache_groups.py).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from caching.host_tier import HostTier

KEY_BYTES = 16
"""Enough against collisions, by accident or by design: blake2b is a cryptographic hash."""


def page_keys(previous: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of the full pages of ``token_ids``, after the page with key ``previous`` or a salt."""
    tokens = array("i", token_ids)
    data, page_bytes = tokens.tobytes(), page_size * tokens.itemsize
    keys = []
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        previous = blake2b(previous + data[start : start + page_bytes], digest_size=KEY_BYTES).digest()
        keys.append(previous)
    return keys


def in_group(key: bytes, group: int) -> bytes:
    """The key of a page in a group of layers; in the first one it is that of the tokens."""
    return key + bytes((group,)) if group else key


class KeysInGroup(Sequence[bytes]):
    """A list of keys as they are in a group of layers."""

    def __init__(self, keys: list[bytes], group: int) -> None:
        self._keys = keys
        self._group = group

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return in_group(self._keys[index], self._group)


class PrefixCache:
    """Which page has which key. The page that lost its last owner first is evicted first.

    HBMPageManager counts owners. Times are in seconds, and the caller's. Contents without an owner
    are offered to the ``tier`` behind this one, if there is any.
    """

    def __init__(self, tier: HostTier | None) -> None:
        self._tier = tier
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept_at: dict[int, float] = {}
        self._unowned: OrderedDict[int, float] = OrderedDict()
        """When each lost its last owner, oldest first."""
        self._passed: set[int] = set()
        """Those without an owner that are not worth a copy."""
        self.evictions = 0
        self.lifetime_seconds = 0.0
        """The sum over evicted pages of the time since they were filled."""
        self.idle_seconds = 0.0
        """The sum over evicted pages of the time since they lost their last owner."""

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def num_unowned(self) -> int:
        """Pages with contents and no owner."""
        return len(self._unowned)

    def holder(self, key: bytes) -> int | None:
        """The page with this key, if there is one."""
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
        """An owned page has this key from now on; of pages with equal contents only the first."""
        if page not in self._key_of and self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key
            self._kept_at[page] = now

    def let_go(self, page: int, now: float) -> None:
        """A page with a key has lost its last owner."""
        self._unowned[page] = now
        if self._tier is not None:
            self._tier.offer(page, self._key_of[page])

    def claim(self, page: int) -> None:
        """A page without an owner has one again."""
        del self._unowned[page]
        self._passed.discard(page)
        if self._tier is not None:
            self._tier.withdraw(page)

    def evict_first(self, page: int) -> None:
        """A page without an owner is the next to be evicted, and is not copied to the tier."""
        self._unowned.move_to_end(page, last=False)
        self._passed.add(page)
        if self._tier is not None:
            self._tier.withdraw(page)

    def evict(self, now: float) -> int:
        """Forget the contents of the page that lost its owner first, and return the page."""
        page, since = next(iter(self._unowned.items()))
        self.evictions += 1
        self.lifetime_seconds += now - self._kept_at[page]
        self.idle_seconds += now - since
        if self._tier is not None and page not in self._passed:
            self._tier.evict(page, self._key_of[page])
        self.forget(page)
        return page

    def forget(self, page: int) -> bool:
        """The page is not found any more. Returns whether it has no owner."""
        del self._page_of[self._key_of.pop(page)], self._kept_at[page]
        self._passed.discard(page)
        if self._tier is not None:
            self._tier.withdraw(page)
        return self._unowned.pop(page, None) is not None

    def pages(self) -> list[int]:
        """All pages with contents."""
        return list(self._key_of)
