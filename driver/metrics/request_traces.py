"""Traces of requests, for an OpenTelemetry collector. The extra ``otel`` has what it imports."""

import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from driver.metrics.request_metrics import timings_of
from driver.open_requests import OpenRequest
from driver.request import ReturnSample
from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

FLUSH_TIMEOUT = 1.0
"""Seconds that the last spans have to leave when the daemon ends."""
_NUMBERS = ("temperature", "top_p", "top_k", "max_tokens", "n")
_LEAST, _BEYOND = -(1 << 63), 1 << 63
"""What OTLP holds of integers: for another it writes a traceback into the log, and a refused request
may have any."""


class RequestTraces:
    """Sends a span ``request`` for each request that ends, with spans ``queue``, ``prefill`` and
    ``decode`` below it, as far as it came; its parent is the client's ``traceparent``.

    ``endpoint`` is a collector's, for OTLP over HTTP. Attributes have vLLM's names. A thread of
    OpenTelemetry's sends them: a collector that is away costs no request anything. The variables
    of OpenTelemetry's SDK hold, such as OTEL_SERVICE_NAME. Raises ConfigurationError.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"otlp_traces_endpoint must be a URL for OTLP over HTTP, such as http://localhost:4318/v1/traces, not {endpoint}"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                'otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install "odriver[otel]"'
            ) from error
        service = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "odriver")})
        self._provider = TracerProvider(resource=service)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("odriver")

    def ended(self, model: str, request: OpenRequest, last: ReturnSample) -> None:
        """Records a request that is refused, or gets its last sample; any thread."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, wall = time.monotonic(), time.time_ns()

        def at(moment: float) -> int:
            return wall - round(1e9 * (now - moment))

        parent = TraceContextTextMapPropagator().extract({"traceparent": request.request.traceparent})
        span = self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=at(request.received_at))
        span.set_attributes(dict(_attributes(model, request, last, now)))
        for name, start, end in (
            ("queue", request.received_at, request.scheduled_at),
            ("prefill", request.scheduled_at, request.first_token_at),
            ("decode", request.first_token_at, request.last_token_at),
        ):
            if start is not None and end is not None:
                phase = self._tracer.start_span(name, set_span_in_context(span), start_time=at(start))
                phase.end(at(end))
        if last.error is not None:
            span.set_status(StatusCode.ERROR, last.error.code)
            span.set_attribute("error.message", last.error.message)
        span.end(at(now))

    def close(self) -> None:
        """Sends what is left, within FLUSH_TIMEOUT."""
        flush = threading.Thread(target=self._provider.shutdown, name="flush traces", daemon=True)
        flush.start()
        flush.join(FLUSH_TIMEOUT)


def _attributes(
    model: str, request: OpenRequest, last: ReturnSample, now: float
) -> "Iterator[tuple[str, AttributeValue]]":
    yield "gen_ai.request.id", request.request_id
    adapter = request.adapter
    yield "gen_ai.response.model", model if adapter is None else adapter.name
    if adapter is not None:
        yield "odriver.adapter_version", adapter.version
    yield "odriver.client", request.request.client
    yield "gen_ai.latency.e2e", now - request.received_at
    params: dict[str, Any] = request.request.params
    for name in _NUMBERS:
        if isinstance(value := params.get(name), int | float) and _LEAST <= value < _BEYOND:
            yield f"gen_ai.request.{name}", value
    if last.finish_reason is not None:
        yield "gen_ai.response.finish_reasons", [last.finish_reason]
    if last.usage is not None:
        yield "gen_ai.usage.prompt_tokens", last.usage.prompt_tokens
        yield "gen_ai.usage.completion_tokens", last.usage.completion_tokens
        yield "gen_ai.usage.cached_tokens", last.usage.cached_tokens
    timings = timings_of(request)
    if timings is not None:
        yield "gen_ai.latency.time_in_queue", timings.queue_time_s
        yield "gen_ai.latency.time_in_model_prefill", timings.prefill_time_s
        yield "gen_ai.latency.time_to_first_token", timings.time_to_first_token_s
        yield "gen_ai.latency.time_in_model_decode", timings.decode_time_s
