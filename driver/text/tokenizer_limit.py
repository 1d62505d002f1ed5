"""How many tokenizer requests may wait, and whose they may be."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from driver.errors import Overloaded
from driver.request import ReturnChannel, ReturnSample, TokenizerRequest
from driver.stages.fair_share import Holder, share


class TokenizerLimit:
    """Counts those that have had no answer, by whose they are. Any thread may call anything: see OpenRequests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._serials = itertools.count()
        self._waiting: dict[int, Holder] = {}

    def submit(self, request: TokenizerRequest, submit: Callable[[TokenizerRequest], None]) -> None:
        """Submits the request, which counts until it is answered; raises Overloaded where it is one too many."""
        holder = request.client, request.user
        found = share(self._max_requests, 1, holder, [(other, 1) for other in list(self._waiting.values())])
        if not found.fits:
            raise Overloaded(f"{found.total:,} tokenizer requests wait already, {found.own:,} of them yours: try later")
        serial = next(self._serials)
        self._waiting[serial] = holder
        try:
            submit(replace(request, channel=_Counted(self, serial, request.channel)))
        except BaseException:
            self.end(serial)
            raise

    def end(self, serial: int) -> None:
        """It has been answered, or will not be; a second time changes nothing."""
        self._waiting.pop(serial, None)


class _Counted:
    """The channel of a request that counts."""

    def __init__(self, limit: TokenizerLimit, serial: int, channel: ReturnChannel) -> None:
        self._limit = limit
        self._serial = serial
        self._channel = channel

    def put(self, sample: ReturnSample) -> None:
        self._limit.end(self._serial)
        self._channel.put(sample)
