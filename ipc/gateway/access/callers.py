"""The callers of the gateway, and what each has used of its limits."""

import asyncio
import hashlib
import hmac
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipc.async_client import AsyncClient, AsyncStream
from ipc.gateway.access.api_keys import ApiKey, digest, read_api_keys
from ipc.openai.question import BodyError

MINUTE = 60.0
NOT_KNOWN = "this API key is not known here, or not any more"


class Unauthorized(BodyError):
    """No API key, or one that is not known."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, code="invalid_api_key")
        self.headers = {"WWW-Authenticate": "Bearer"}


class TooMany(BodyError):
    """More than a key may; ``retry_after`` is in how many seconds to come again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.retry_after = retry_after


class Caller:
    """A caller and what it has used; ``key`` is its key for the daemons. Times are in seconds."""

    def __init__(self, name: str, limits: ApiKey | None, key: Path | None) -> None:
        self.name = name
        self.limits = limits
        self.key = key
        self.is_removed = False
        """Whether it has been taken out of the file."""
        self._num_open = 0
        self._working: set[asyncio.Task[Any]] = set()
        self._allowance = float(limits.requests_per_minute or 0) if limits else 0.0
        self._at = 0.0

    def begin(self, now: float) -> None:
        """One more request is open; raises TooMany."""
        limits = self.limits
        if limits is not None and limits.max_requests is not None and self._num_open >= limits.max_requests:
            raise TooMany(f"{self.name} may have {limits.max_requests} requests open at once: wait for one to end", 1.0)
        if limits is not None and limits.requests_per_minute is not None:
            self._spend(limits.requests_per_minute, now)
        self._num_open += 1

    def end(self) -> None:
        """One is open no more."""
        self._num_open -= 1

    @contextmanager
    def working(self) -> Iterator[None]:
        """While the running task answers a request of this caller; it is cancelled if the caller is removed."""
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            yield
        finally:
            self._working.discard(task)

    def remove(self) -> None:
        """It is not in the file any more."""
        self.is_removed = True
        for task in self._working:
            task.cancel()

    def client(self, address: str, **options: Any) -> AsyncClient:
        """A client with the caller's own connection: the daemon is fair between connections.

        ``options`` are those of AsyncClient, but for the key.
        """
        if self.limits is None:
            return AsyncClient(address, key=self.key, **options)
        return CallerClient(address, self, key=self.key, **options)

    def _spend(self, per_minute: int, now: float) -> None:
        self._allowance = min(per_minute, self._allowance + (now - self._at) * per_minute / MINUTE)
        self._at = now
        if self._allowance < 1:
            wait = (1 - self._allowance) * MINUTE / per_minute
            raise TooMany(f"{self.name} may ask {per_minute} times a minute: try again in {wait:.0f} s", wait)
        self._allowance -= 1


class CallerClient(AsyncClient):
    """A client for a caller of the file.

    Without a key of the caller's own, by which the daemon would tell it from others, its prompts
    have a salt: their pages are not shared. It follows from the API key, as the salts of others at
    the same daemon are their own to choose, and none may be able to choose this one.
    """

    def __init__(self, address: str, caller: Caller, **options: Any) -> None:
        super().__init__(address, **options)
        self._caller = weakref.ref(caller)  # which is kept for the caller's sake
        self._name = caller.name
        self._secret = b"" if caller.limits is None else caller.limits.api_key.encode()

    def _stream(self, **question: Any) -> AsyncStream:
        params, caller = question.pop("params"), self._caller()
        limits = None if caller is None else caller.limits
        if limits is not None and (params.get("priority") or 0) < limits.least_priority:
            why = f"priority must be at least {limits.least_priority} for {self._name}"
            raise BodyError(why, "priority", status=403, code="forbidden")
        if limits is None or limits.key is None:
            given = str(params.get("cache_salt", "")).encode()
            params = {**params, "cache_salt": hmac.new(self._secret, given, hashlib.sha256).hexdigest()}
        return super()._stream(params=params, **question)


class Callers:
    """The callers of a file, and one caller for all who send ``api_key``. Raises KeyFileError.

    Without either, that one is everybody. ``key`` is the gateway's own key for the daemons, used
    for callers without one.
    """

    def __init__(self, path: Path | None = None, key: Path | None = None, api_key: str | None = None) -> None:
        self.is_open = path is None and api_key is None
        """Whether a request needs no key."""
        self._everybody = Caller("", None, key)
        self._api_key = None if api_key is None else digest(api_key)
        self._path = path
        self._key = key
        self._by_digest = {} if path is None else self._read(path)

    def identified(self, authorization: str | None) -> Caller:
        """The caller of an Authorization header. Raises Unauthorized."""
        if self.is_open:
            return self._everybody
        scheme, _, api_key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not api_key:
            raise Unauthorized("this gateway asks for an API key: send it as `Authorization: Bearer KEY`")
        sent = digest(api_key.strip())
        caller = self._everybody if sent == self._api_key else self._by_digest.get(sent)
        if caller is None:
            raise Unauthorized(NOT_KNOWN)
        return caller

    def reload(self) -> str:
        """Read the file again; says how many keys it has, nothing where there is no file. Callers
        keep what they have used; the requests of those who are not in it any more end.

        Raises KeyFileError, and changes nothing then.
        """
        if self._path is None:
            return ""
        found = self._read(self._path)
        for name, caller in found.items():
            before = self._by_digest.get(name)
            if before is not None and (before.name, before.key) == (caller.name, caller.key):
                before.limits = caller.limits
                found[name] = before
        removed = [caller for name, caller in self._by_digest.items() if found.get(name) is not caller]
        self._by_digest = found
        for caller in removed:
            caller.remove()
        return f"{len(found)} API keys are known"

    def _read(self, path: Path) -> dict[bytes, Caller]:
        found = {}
        for name, entry in read_api_keys(path).items():
            key = self._key if entry.key is None else path.parent / entry.key
            found[digest(entry.api_key)] = Caller(name, entry, key)
        return found
