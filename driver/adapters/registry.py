"""The adapters that requests can name."""

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from copy import copy

import msgspec

from driver.errors import InvalidRequest, NotFound, Overloaded
from engine.adapters.adapter import Adapter

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MOST_NAMES = 20
"""Names that an error lists."""


class LoadedAdapter(msgspec.Struct, eq=False):
    """One version of an adapter, as it is listed; the registry's lock guards what changes."""

    name: str
    path: str
    """As it was given."""
    version: int
    """The engine's ``uid``, never used twice."""
    rank: int
    num_bytes: int
    """Of host memory."""
    pinned: bool
    loaded_at: float
    """In seconds since 1970."""
    open_requests: int = 0
    """Those that have it."""


def check_name(name: str, model_names: Collection[str]) -> None:
    """Raises InvalidRequest where no adapter of a model of these names can have this one."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} can be no adapter's name: use up to 128 letters, digits, '.', '_' and '-', the first a letter "
            "or digit"
        )
    if name in model_names:
        raise InvalidRequest(f"{name} is the model itself: an adapter needs another name")


class AdapterRegistry:
    """Any thread may call any method; none waits.

    At most ``capacity`` adapters are in memory, 0 if none are served, those included that were
    replaced or unloaded and are there only for their open requests. ``remove`` is called with the
    uid of each that nothing needs any more: no request that is admitted later has it.
    """

    def __init__(self, capacity: int, model_names: Collection[str], remove: Callable[[int], None]) -> None:
        self._capacity = capacity
        self._model_names = model_names
        self._remove = remove
        self._changing = threading.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}
        """The least recently used first."""
        self._in_memory: dict[int, LoadedAdapter] = {}
        self.num_loads = 0
        self.num_evictions = 0

    def acquire(self, name: str, allowed: Collection[str] | None) -> LoadedAdapter | None:
        """The adapter that a request names, which stays until ``release``; None for the model
        itself.

        ``allowed`` are the adapters that the client may use, None for all. Raises NotFound.
        """
        if self._is_model(name):
            return None
        with self._changing:
            adapter = self._find(name, allowed)
            adapter.open_requests += 1
            self._by_name[name] = self._by_name.pop(name)
            return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """A request that had it has ended."""
        with self._changing:
            adapter.open_requests -= 1
            self._remove_unless_needed(adapter)

    def check(self, name: str, allowed: Collection[str] | None) -> None:
        """Raises NotFound where ``acquire`` would."""
        if not self._is_model(name):
            with self._changing:
                self._find(name, allowed)

    def rows(self, allowed: Collection[str] | None = None) -> list[LoadedAdapter]:
        """Copies of those that a client may use, by name."""
        with self._changing:
            adapters = [adapter for name, adapter in self._by_name.items() if allowed is None or name in allowed]
            return [copy(adapter) for adapter in sorted(adapters, key=lambda adapter: adapter.name)]

    def names(self, uids: Collection[int]) -> list[str]:
        """The names of these, as far as they are known."""
        with self._changing:
            found = {self._in_memory[uid].name for uid in uids if uid in self._in_memory}
        return sorted(found)

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest where no adapter can have this name."""
        check_name(name, self._model_names)

    def check_loadable(self, name: str, *, replace: bool) -> None:
        """Raises InvalidRequest or Overloaded where this cannot be loaded now."""
        with self._changing:
            if name in self._by_name and not replace:
                raise InvalidRequest(f"the adapter {name} is loaded already: unload it, or load it in place")
            self._evictable(name)

    def make_room(self, name: str) -> list[str]:
        """Evict idle adapters until another version of this one has room; their names.

        Raises Overloaded, and changes nothing then.
        """
        with self._changing:
            evicted = self._evictable(name)
            for adapter in evicted:
                del self._by_name[adapter.name]
                self._remove_unless_needed(adapter)
            self.num_evictions += len(evicted)
            return [adapter.name for adapter in evicted]

    def put(self, name: str, adapter: Adapter, path: str, *, pin: bool) -> None:
        """From now on requests of this name get this version; the one before goes with its last
        request. A name that was pinned stays so."""
        with self._changing:
            before = self._by_name.pop(name, None)
            pinned = pin or (before is not None and before.pinned)
            loaded = LoadedAdapter(name, path, adapter.uid, adapter.rank, adapter.num_bytes, pinned, time.time())
            self._by_name[name] = self._in_memory[adapter.uid] = loaded
            self.num_loads += 1
            if before is not None:
                self._remove_unless_needed(before)

    def withdraw(self, name: str) -> int:
        """New requests cannot have it; how many open ones go on with it. Raises NotFound."""
        with self._changing:
            adapter = self._find(name, None)
            del self._by_name[name]
            self._remove_unless_needed(adapter)
            return adapter.open_requests

    def _is_model(self, name: str) -> bool:
        return not name or name in self._model_names

    def _find(self, name: str, allowed: Collection[str] | None) -> LoadedAdapter:
        adapter = self._by_name.get(name)
        if adapter is not None and (allowed is None or name in allowed):
            return adapter
        adapters = sorted(one for one in self._by_name if allowed is None or one in allowed)
        raise NotFound(f"no model or adapter {name!r} is served here: there {_listed([*self._model_names, *adapters])}")

    def _evictable(self, name: str) -> list[LoadedAdapter]:
        """Those to evict for another version of this adapter; raises Overloaded."""
        before = self._by_name.get(name)
        goes_at_once = before is not None and not before.open_requests
        excess = len(self._in_memory) + 1 - goes_at_once - self._capacity
        idle = [one for one in self._by_name.values() if not (one.pinned or one.open_requests or one is before)]
        if excess > len(idle):
            raise Overloaded(
                f"{len(self._in_memory)} adapters are in memory, as many as --max-cpu-loras, and none is both idle and not "
                "pinned: unload one, or try again when requests have ended"
            )
        return idle[: max(0, excess)]

    def _remove_unless_needed(self, adapter: LoadedAdapter) -> None:
        if not adapter.open_requests and self._by_name.get(adapter.name) is not adapter:
            del self._in_memory[adapter.version]
            self._remove(adapter.version)


def _listed(names: Sequence[str]) -> str:
    shown, more = names[:MOST_NAMES], len(names) - MOST_NAMES
    return f"{'are' if len(names) > 1 else 'is'} {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")
