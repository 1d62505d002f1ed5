"""Counts and times of requests. Names, meaning and buckets of the histograms are vLLM's.

With ``n`` above 1 each sample counts as a request, as in vLLM.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from driver.open_requests import OpenRequest
from driver.request import Timings
from driver.thread_messages import Opened
from engine.metrics.histogram import Histogram

FINISH_REASONS = ("stop", "length", "abort", "repetition", "timeout")
"""vLLM's, without "error": errors are counted by their codes (request_log.py)."""

_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_PER_TOKEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_PER_REQUEST = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
_SAMPLES = (1, 2, 5, 10, 20)
RECENT = 256
"""Samples that the percentiles are taken of."""


class Latencies(NamedTuple):
    """Seconds from arrival to first token, between tokens on average, from arrival to end."""

    ttft: float
    tpot: float
    e2e: float


class PromptTokens(NamedTuple):
    """Prompt tokens by where their keys and values came from."""

    computed: int = 0
    cached: int = 0
    """From the device's part of the prefix cache."""
    from_host: int = 0
    """From the host's part."""


class RequestMetrics:
    """Histograms and counts since the start. The summary thread writes, any may read."""

    def __init__(self, max_model_len: int) -> None:
        tokens = tuple(_one_two_five(max_model_len))
        self.time_to_first_token_seconds = Histogram(_TTFT)
        self.inter_token_latency_seconds = Histogram(_PER_TOKEN)
        self.request_time_per_output_token_seconds = Histogram(_PER_TOKEN)
        self.e2e_request_latency_seconds = Histogram(_PER_REQUEST)
        self.request_queue_time_seconds = Histogram(_PER_REQUEST)
        self.request_inference_time_seconds = Histogram(_PER_REQUEST)
        self.request_prefill_time_seconds = Histogram(_PER_REQUEST)
        self.request_decode_time_seconds = Histogram(_PER_REQUEST)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_prefill_kv_computed_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_params_max_tokens = Histogram(tokens)
        self.request_params_n = Histogram(_SAMPLES)
        self.request_max_num_generation_tokens = Histogram(tokens)
        self.prompt_tokens = PromptTokens()
        """Of requests that have a first token. It is replaced, whole, so that who reads it between
        two of its numbers does not see one fall."""
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self._recent: deque[Latencies] = deque(maxlen=RECENT)

    def note(self, latencies: "Latencies") -> None:
        """Adds a sample that has ended and had tokens."""
        self._recent.append(latencies)

    def percentiles(self) -> dict[str, float]:
        """Percentiles of recent samples in seconds: ``ttft_seconds_p50`` and so on."""
        recent = list(self._recent)
        return {
            f"{name}_seconds_p{percent}": values[round(percent / 100 * (len(values) - 1))]
            for name, *unsorted in zip(Latencies._fields, *recent, strict=True)
            for values in [sorted(unsorted)]
            if values
            for percent in (50, 99)
        }

    def histograms(self) -> dict[str, Histogram]:
        """All histograms, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Histogram)}


class SampleTimes:
    """The times of one sample of a request, in seconds of the caller's clock."""

    def __init__(self, metrics: RequestMetrics, opened: Opened, index: int) -> None:
        self._metrics = metrics
        self._opened = opened
        self._index = index
        self._sequence = opened.sequences[index]
        self._received_at = opened.request.received_at
        self.num_tokens = 0
        self._first_at: float | None = None
        self._last_at = 0.0

    def add_tokens(self, count: int, now: float) -> None:
        """Notes that ``count`` tokens came."""
        self.num_tokens += count
        request = self._opened.request
        request.num_new_tokens += count
        request.last_token_at = now
        if self._first_at is None:
            self._first_at = now
            self._metrics.time_to_first_token_seconds.observe(now - self._received_at)
            self._add_prompt()
            request.first_token_at = request.first_token_at or now
            request.scheduled_at = request.scheduled_at or self._sequence.scheduled_at
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self._last_at)
        self._last_at = now

    def _add_prompt(self) -> None:
        found = self._opened.num_cached_tokens(self._index)
        # at most: the execution thread may have found more in between, after a preemption
        from_host = min(found, self._opened.num_host_tokens(self._index))
        before = self._metrics.prompt_tokens
        self._metrics.prompt_tokens = PromptTokens(
            before.computed + self._opened.num_prompt_tokens - found,
            before.cached + found - from_host,
            before.from_host + from_host,
        )

    def finish(self, reason: str | None, now: float) -> None:
        """Notes that the sample has ended; None is an error."""
        metrics = self._metrics
        if reason is not None:
            metrics.finished[reason] += 1
        metrics.e2e_request_latency_seconds.observe(now - self._received_at)
        metrics.request_prompt_tokens.observe(self._opened.num_prompt_tokens)
        num_computed = self._opened.num_prompt_tokens - self._opened.num_cached_tokens(self._index)
        metrics.request_prefill_kv_computed_tokens.observe(num_computed)
        metrics.request_generation_tokens.observe(self.num_tokens)
        if self._opened.params.max_tokens is not None:
            metrics.request_params_max_tokens.observe(self._opened.params.max_tokens)
        scheduled_at = self._sequence.scheduled_at
        metrics.request_queue_time_seconds.observe((scheduled_at or now) - self._received_at)
        if scheduled_at is not None and self._first_at is not None:
            self._finish_phases(scheduled_at, self._first_at)

    def _finish_phases(self, scheduled_at: float, first_at: float) -> None:
        metrics, decode = self._metrics, self._last_at - first_at
        metrics.request_inference_time_seconds.observe(self._last_at - scheduled_at)
        metrics.request_prefill_time_seconds.observe(first_at - scheduled_at)
        metrics.request_decode_time_seconds.observe(decode)
        per_token = decode / max(1, self.num_tokens - 1)
        metrics.request_time_per_output_token_seconds.observe(per_token)
        metrics.note(Latencies(first_at - self._received_at, per_token, self._last_at - self._received_at))


def timings_of(request: OpenRequest) -> Timings | None:
    """The phases of a request so far; None before its first token."""
    received_at, scheduled_at, first_at = request.received_at, request.scheduled_at, request.first_token_at
    if scheduled_at is None or first_at is None or request.last_token_at is None:
        return None
    decode = request.last_token_at - first_at
    return Timings(
        queue_time_s=scheduled_at - received_at,
        prefill_time_s=first_at - scheduled_at,
        time_to_first_token_s=first_at - received_at,
        decode_time_s=decode,
        tokens_per_second=(request.num_new_tokens - 1) / decode if decode > 0 else 0.0,
    )


def _one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to ``most``."""
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > most:
                return
            yield mantissa * scale
        scale *= 10
