"""Traces of requests, as a collector gets them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine
from test_driver import build_driver, error_of, submit

from driver.errors import Draining
from driver.metrics.request_traces import RequestTraces
from engine.errors import ConfigurationError
from engine.scheduling.sequence import Sequence
from ipc.client import Client
from ipc.errors import RequestFailed

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


class Collector:
    """Takes OTLP over HTTP, as spans by name."""

    def __init__(self) -> None:
        self.spans: SimpleQueue[Any] = SimpleQueue()
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def take(self, count: int) -> dict[str, Any]:
        """So many spans, by name."""
        spans = [self.spans.get(timeout=PATIENCE) for _ in range(count)]
        return {span.name: span for span in spans}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on this machine."""
    collector = Collector()
    yield collector
    collector.stop()


class TimedEngine(FakeEngine):
    """Says when a sequence was scheduled, as the real one does."""

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        sequence.scheduled_at = self.clock()

    @staticmethod
    def clock() -> float:
        import time

        return time.monotonic()


def attributes(span: Any) -> dict[str, Any]:
    """A span's, by name."""
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value"))
        for one in span.attributes
        if one.value.WhichOneof("value") != "array_value"
    }


def test_a_request_is_a_span_with_its_phases_below_it(collector: Collector) -> None:
    """In the client's trace; the phases follow each other, and one that fails before a token has none but an error.

    One that is refused at once has that too.
    """
    traces = RequestTraces(collector.endpoint)
    with build_driver(TimedEngine()) as driver:
        driver.observe(partial(traces.ended, "parrot"))
        list(submit(driver, "c:1", "ab", params={"max_tokens": 3}, traceparent=TRACEPARENT, client="alice"))
        error_of(submit(driver, "c:2", "ab", params={"top_p": 7}))
        driver.drain(lambda: None)
        with pytest.raises(Draining):
            submit(driver, "c:3", "ab", traceparent=TRACEPARENT)
    traces.close()

    both = [collector.spans.get(timeout=PATIENCE) for _ in range(6)]
    refused, failed = both.pop(), both.pop()
    spans = {span.name: span for span in both}
    request, *phases = (spans[name] for name in ("request", "queue", "prefill", "decode"))
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
    assert {(span.trace_id, span.parent_span_id) for span in phases} == {(request.trace_id, request.span_id)}
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    for before, after in pairwise(phases):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 2000
    assert phases[-1].end_time_unix_nano <= request.end_time_unix_nano
    told = attributes(request)
    assert (
        told.items()
        >= {
            "gen_ai.request.id": "c:1", "gen_ai.response.model": "parrot", "odriver.client": "alice",
            "gen_ai.usage.prompt_tokens": 2, "gen_ai.usage.completion_tokens": 3, "gen_ai.request.max_tokens": 3,
        }.items()
    )  # fmt: skip
    assert told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert (failed.name, failed.status.code, failed.status.message) == ("request", 2, "invalid_request")
    assert failed.trace_id != request.trace_id and failed.parent_span_id == b""
    assert "top_p must be" in attributes(failed)["error.message"]
    assert (refused.name, refused.status.message, refused.trace_id.hex()) == ("request", "draining", TRACE)


def test_a_number_that_no_span_holds_is_left_out(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    """A client that asks for the impossible writes no traceback into the log."""
    traces = RequestTraces(collector.endpoint)
    with build_driver() as driver:
        driver.observe(partial(traces.ended, "parrot"))
        error_of(submit(driver, params={"max_tokens": 2**64 - 1, "n": 2, "top_p": -1e300}))
    traces.close()

    told = attributes(collector.take(1)["request"])
    assert told["gen_ai.request.n"] == 2 and "gen_ai.request.max_tokens" not in told
    assert caplog.messages == []


def test_a_span_names_the_adapter_of_its_request(collector: Collector) -> None:
    """As the model that answered, with its version."""
    traces = RequestTraces(collector.endpoint)
    with build_driver(max_cpu_loras=1) as driver:
        driver.observe(partial(traces.ended, "parrot"))
        driver.load_first({"alice": "a"})
        list(submit(driver, model="alice"))
    traces.close()

    found = attributes(collector.take(2)["request"])  # the other is of its decoding
    assert (found["gen_ai.response.model"], found["odriver.adapter_version"]) == ("alice", 1)


def test_a_collector_that_is_away_delays_no_end() -> None:
    """Its spans are lost, and the daemon does not wait for it."""
    traces = RequestTraces("http://127.0.0.1:9/v1/traces")
    with build_driver(TimedEngine()) as driver:
        driver.observe(partial(traces.ended, "parrot"))
        assert list(submit(driver))[-1].finish_reason == "length"

    with ThreadPoolExecutor(1) as thread:
        thread.submit(traces.close).result(PATIENCE)


def test_a_client_says_what_trace_its_request_belongs_to(driver: Any, address: str) -> None:
    """As W3C writes it; anything else is refused."""
    with Client(address) as client:
        list(client.generate("x", traceparent=TRACEPARENT))
        list(client.chat([{"role": "user", "content": "x"}], traceparent=TRACEPARENT))
        with pytest.raises(RequestFailed, match="traceparent"):
            list(client.generate("x", traceparent="00-abc"))

    assert [request.traceparent for request in driver.submitted] == [TRACEPARENT] * 2


def test_what_is_no_endpoint_of_a_collector_is_refused() -> None:
    """gRPC's, most of all, which vLLM's flag takes."""
    with pytest.raises(ConfigurationError, match="OTLP over HTTP"):
        RequestTraces("grpc://localhost:4317")


def test_nobody_imports_opentelemetry_who_was_not_asked_to() -> None:
    """Neither clients nor a daemon without an endpoint."""
    code = (
        "import sys, ipc.client, ipc.async_client, ipc.service.daemon, driver.odriver;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigurationError, match=r'pip install "odriver\[otel\]"'):
        RequestTraces("http://localhost:4318/v1/traces")
