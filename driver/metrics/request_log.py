"""A line in the log for each request, and counts of those that ended without a sample of their own."""

import logging
import threading
import time
from collections import Counter

from driver.metrics.request_metrics import timings_of
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, ReturnSample

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs and counts the ends of requests; called on the threads where they end."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """By error code."""
        self.aborted_early = 0
        """Those that were aborted before they had sequences."""
        self._counting = threading.Lock()

    def ended(self, request: OpenRequest, last: ReturnSample) -> None:
        """Logs a request that is refused, or gets its last sample."""
        if last.error is not None:
            self.count(last.error.code)
        elif not request.is_counted:
            with self._counting:
                self.aborted_early += 1
        if not logger.isEnabledFor(logging.INFO):
            return
        facts: dict[str, object] = {"seconds": round(time.monotonic() - request.received_at, 4)}
        if request.adapter is not None:
            facts |= {"adapter": request.adapter.name, "adapter_version": request.adapter.version}
        if last.usage is not None:
            facts |= {
                "prompt_tokens": last.usage.prompt_tokens,
                "cached_tokens": last.usage.cached_tokens,
                "completion_tokens": last.usage.completion_tokens,
            }
        if request.first_token_at is not None:
            facts["seconds_to_first_token"] = round(request.first_token_at - request.received_at, 4)
        timings = timings_of(request)
        if timings is not None:
            facts |= {
                "seconds_queued": round(timings.queue_time_s, 4),
                "seconds_prefilling": round(timings.prefill_time_s, 4),
                "tokens_per_second": round(timings.tokens_per_second, 1),
            }
        if last.weight_versions:
            facts["weight_versions"] = last.weight_versions
        if last.error is not None:
            facts["error"] = last.error.message
        _log(request.request, last.error.code if last.error is not None else last.finish_reason, facts)

    def count(self, code: str) -> None:
        """Counts a request that ended with this error."""
        with self._counting:
            self.failed[code] += 1


def _log(request: ActiveRequest, reason: str | None, facts: dict[str, object]) -> None:
    details = ", ".join(f"{name} {value}" for name, value in facts.items())
    fields = {"request_id": request.request_id, "client": request.client, "finish_reason": reason, **facts}
    logger.info("request %s: %s; %s", request.request_id, reason, details, extra=fields)
