"""A line in the log for each request, and a count of those that ended with an error."""

import logging
import threading
import time
from collections import Counter

from driver.errors import DriverError
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, ReturnSample

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs and counts the ends of requests; called on the threads where they end."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """By error code."""
        self._counting = threading.Lock()

    def ended(self, request: OpenRequest, last: ReturnSample) -> None:
        """Logs an open request that gets its last sample."""
        if last.error is not None:
            self._count(last.error.code)
        if not logger.isEnabledFor(logging.INFO):
            return
        now, received_at = time.monotonic(), request.received_at
        facts: dict[str, object] = {"seconds": round(now - received_at, 4)}
        if last.usage is not None:
            facts |= {"prompt_tokens": last.usage.prompt_tokens, "completion_tokens": last.usage.completion_tokens}
        if request.first_token_at is not None:
            facts["seconds_to_first_token"] = round(request.first_token_at - received_at, 4)
        if request.scheduled_at is not None:
            facts["seconds_queued"] = round(request.scheduled_at - received_at, 4)
        if last.error is not None:
            facts["error"] = last.error.message
        _log(request.request, last.error.code if last.error is not None else last.finish_reason, facts)

    def refused(self, request: ActiveRequest, error: DriverError) -> None:
        """Logs a request that was refused."""
        self._count(error.code)
        _log(request, error.code, {"error": str(error)})

    def _count(self, code: str) -> None:
        with self._counting:
            self.failed[code] += 1


def _log(request: ActiveRequest, reason: str | None, facts: dict[str, object]) -> None:
    details = ", ".join(f"{name} {value}" for name, value in facts.items())
    fields = {"request_id": request.request_id, "client": request.client, "finish_reason": reason, **facts}
    logger.info("request %s: %s; %s", request.request_id, reason, details, extra=fields)
