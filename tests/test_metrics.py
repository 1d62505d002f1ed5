"""What Prometheus is shown."""

import itertools
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_driver import build_driver, error_of, submit
from test_driver_abort import HeldTokenizer

from driver.errors import Draining, DriverError, DriverStopped, DuplicateRequest, NotFound, Overloaded
from driver.metrics.driver_metrics import DriverMetrics
from driver.metrics.request_metrics import PromptTokens, RequestMetrics, SampleTimes, timings_of
from driver.odriver import oDriver
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, QueueChannel, Timings
from driver.status import DriverStatus
from driver.thread_messages import Opened
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from ipc.errors import AddressInUse
from ipc.service.monitoring import metrics_server
from ipc.service.monitoring.exposition import Exposition
from ipc.service.monitoring.metrics_server import MAX_CONNECTIONS, MetricsServer

ASKED_FOR = Path(__file__).with_name("vllm_metrics.txt")
LABELS = {"model_name": "parrot", "engine": "0"}


def exposed(driver: oDriver) -> str:
    """The text of a scrape."""
    registry = CollectorRegistry()
    registry.register(DriverMetrics(driver, "parrot", {"block_size": "16", "num_gpu_blocks": "100"}))
    return generate_latest(registry).decode()


def values(text: str) -> dict[str, float]:
    """By name, and by what is in the labels beside model and engine."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = [value for name, value in sample.labels.items() if name not in LABELS]
            found[" ".join([sample.name, *rest])] = sample.value
    return found


def test_every_name_that_is_asked_of_vllm_is_there_with_its_type() -> None:
    """Labelled with model and engine, as the queries of dashboards are."""
    lines = [line.split() for line in ASKED_FOR.read_text().splitlines() if line and not line.startswith("#")]

    with build_driver() as driver:
        text = exposed(driver)

    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {name: types.get(name) for name, _ in lines} == dict(lines)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name != "vllm:cache_config_info":
                assert sample.labels.items() >= LABELS.items(), sample
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="parrot"} 0.0' in text


@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in msgspec.structs.fields(DriverStatus)
        if field.type in (int, float) and not field.name.endswith(("_p50", "_p99"))
    ],
)
def test_every_number_of_the_status_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the percentiles, of which the histograms say more."""
    with build_driver() as driver:
        monkeypatch.setattr(driver, "status", lambda: DriverStatus(**{name: 12345}))

        assert " 12345.0" in exposed(driver)


def test_adapters_that_run_and_wait_are_labels_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; the value is when that was."""
    with build_driver(max_cpu_loras=4) as driver:
        driver.load_first({"alice": "a", "bob": "b", "carol": "c"})
        status = DriverStatus(max_loras=2, adapters_running={2: 1, 1: 3}, adapters_waiting={3: 1})
        monkeypatch.setattr(driver, "status", lambda: status)
        text = exposed(driver)

    labels = 'max_lora="2",running_lora_adapters="alice,bob",waiting_lora_adapters="carol"'
    assert f"vllm:lora_requests_info{{{labels}}} 1." in text
    assert "odriver_adapter_loads_total" in text


def test_accepted_tokens_are_shown_by_position_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0, the draft that follows the token that a step feeds."""
    with build_driver() as driver:
        monkeypatch.setattr(driver, "status", lambda: DriverStatus(num_accepted_tokens_per_pos=(7, 3)))
        found = values(exposed(driver))

    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert {key: value for key, value in found.items() if key.startswith(name)} == {f"{name} 0": 7, f"{name} 1": 3}


def test_nothing_is_shown_twice() -> None:
    """Prometheus takes one value of a name with the same labels, and complains of a second."""
    with build_driver() as driver:
        lines = [line.rpartition(" ")[0] for line in exposed(driver).splitlines() if not line.startswith("#")]

    assert len(lines) > 50 and len(lines) == len(set(lines))


def test_requests_are_counted_as_they_end() -> None:
    """By reason, with their tokens; a refused one by its code, and each sample of ``n`` for itself."""
    with build_driver(FakeEngine()) as driver:
        list(submit(driver, "a", "ab", params={"max_tokens": 3}))
        list(submit(driver, "b", "xy", params={"max_tokens": 10, "stop": ["y"]}))
        list(submit(driver, "c", "abcd", params={"max_tokens": 5, "n": 2}))
        assert error_of(submit(driver, "d", "a", params={"top_p": 7}))[0] == "invalid_request"
        found = values(exposed(driver))

    assert found["vllm:iteration_tokens_total_count"] == found["odriver_steps_total"] > 0
    assert found["vllm:request_success_total length"] == 3
    assert found["vllm:request_success_total stop"] == 1
    assert found["vllm:request_success_total abort"] == 0
    assert found["odriver_requests_failed_total invalid_request"] == 1
    assert found["vllm:prompt_tokens_total"] == found["vllm:request_prompt_tokens_sum"] == 2 + 2 + 4 + 4
    assert found["vllm:request_generation_tokens_sum"] == 3 + 2 + 5 + 5
    assert found["vllm:request_max_num_generation_tokens_sum"] == 3 + 2 + 5
    assert found["vllm:request_params_n_sum"] == 1 + 1 + 2
    assert found["vllm:request_params_max_tokens_sum"] == 3 + 10 + 5 + 5
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 4
    assert found["vllm:inter_token_latency_seconds_count"] == 2 + 1 + 4 + 4


class BadRequest(FakeEngine):
    """Fails at a prompt that begins with "!"."""

    def add(self, sequence: Sequence) -> None:
        if sequence.prompt_token_ids[0] == ord("!"):
            raise RuntimeError("it is bad")
        super().add(sequence)


def test_whatever_a_client_asks_for_is_counted_once() -> None:
    """By how it ends, or by the code of its error: aborted before, while and after it is prepared, refused in any way, in
    a step that fails, or by a driver that ends or has ended."""
    tokenizer = HeldTokenizer()

    def refused(error: type[DriverError], request_id: str, **fields: Any) -> None:
        with pytest.raises(error):
            submit(driver, request_id, **fields)

    with build_driver(BadRequest(), tokenizer, max_queued_requests=5, model_names=["parrot"]) as driver:
        held = [submit(driver, name, "ab", params={"max_tokens": 1}) for name in "abcd"]
        held.append(submit(driver, "bad", "!", params={"n": 2}))
        refused(DuplicateRequest, "a")
        refused(Overloaded, "e")
        refused(NotFound, "f", model="owl")
        assert tokenizer.asked.wait(timeout=PATIENCE)
        for name in "abd":
            driver.abort(name)
        tokenizer.let_go.set()
        for channel in held:
            list(channel)
        assert error_of(submit(driver, "g", params={"top_p": 7}))[0] == "invalid_request"
        driver.drain(lambda: None)
        refused(Draining, "h")
        driver.stop("the end")
        refused(Draining, "i")
        found = values(exposed(driver))

    counts = {
        name.rpartition("_total ")[2]: value
        for name, value in found.items()
        if name.startswith(("vllm:request_success_total", "odriver_requests_failed_total")) and value
    }
    assert counts == {
        "abort": 3, "length": 1, "internal": 1, "duplicate_request": 1, "overloaded": 1, "not_found": 1,
        "invalid_request": 1, "draining": 2,
    }  # fmt: skip


def test_a_driver_that_has_ended_counts_whom_it_refuses() -> None:
    """And so is counted who is open at its end."""
    with build_driver(FakeEngine(gate=threading.Semaphore(1))) as driver:
        channel = submit(driver)
        driver.stop("the end", timeout=0.1)  # a step hangs
        assert error_of(channel)[0] == "stopped"
        with pytest.raises(DriverStopped):
            submit(driver, "b")

        assert values(exposed(driver))["odriver_requests_failed_total stopped"] == 2


def test_the_time_between_tokens_is_that_between_outputs() -> None:
    """As in vLLM: an output of several tokens counts once, and the time per output token is by tokens."""
    engine = FakeEngine()
    engine.counts = itertools.repeat(3)
    with build_driver(engine) as driver:
        list(submit(driver, "a", "ab", params={"max_tokens": 7}))
        found = values(exposed(driver))

    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:request_generation_tokens_sum"] == 7
    decode, per_token = (
        found[f"vllm:{name}_seconds_sum"] for name in ("request_decode_time", "request_time_per_output_token")
    )
    assert per_token == pytest.approx(decode / 6)


def test_the_phases_of_a_request_add_up() -> None:
    """Queue, prefill and decode are the whole, and each value is in the bucket that vLLM would have it in."""
    metrics = RequestMetrics(max_model_len=300)
    request = OpenRequest(ActiveRequest(request_id="a", channel=QueueChannel()), "a", received_at=100.0)
    params = SamplingParams(max_tokens=50)
    sequence = Sequence(
        "a",
        [1, 2, 3],
        params,
        frozenset(),
        max_tokens=50,
        seed=0,
        scheduled_at=100.4,
        num_cached_tokens=2,
        num_host_tokens=1,
    )
    times = SampleTimes(metrics, Opened(request, [sequence], [], 3, params), 0)

    times.add_tokens(1, 101.0)
    times.add_tokens(1, 101.5)
    times.add_tokens(2, 102.0)
    times.finish("stop", 102.125)

    assert metrics.percentiles() == {
        "ttft_seconds_p50": 1.0, "ttft_seconds_p99": 1.0, "tpot_seconds_p50": 1 / 3, "tpot_seconds_p99": 1 / 3,
        "e2e_seconds_p50": 2.0, "e2e_seconds_p99": 2.0,
    }  # fmt: skip
    sums = {name: round(histogram.sum, 9) for name, histogram in metrics.histograms().items() if histogram.sum}
    assert sums == {
        "time_to_first_token_seconds": 1.0, "inter_token_latency_seconds": 1.0, "e2e_request_latency_seconds": 2.125,
        "request_queue_time_seconds": 0.4, "request_prefill_time_seconds": 0.6, "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 1.6, "request_time_per_output_token_seconds": round(1 / 3, 9),
        "request_prompt_tokens": 3, "request_prefill_kv_computed_tokens": 1, "request_generation_tokens": 4, "request_params_max_tokens": 50,
    }  # fmt: skip
    assert dict(metrics.time_to_first_token_seconds.cumulative())[1.0] == 1
    assert dict(metrics.time_to_first_token_seconds.cumulative())[0.75] == 0
    assert metrics.prompt_tokens == PromptTokens(computed=1, cached=1, from_host=1)
    assert metrics.request_prompt_tokens.bounds == (1, 2, 5, 10, 20, 50, 100, 200)
    assert timings_of(request) == Timings(
        queue_time_s=pytest.approx(0.4),
        prefill_time_s=pytest.approx(0.6),
        time_to_first_token_s=1.0,
        decode_time_s=1.0,
        tokens_per_second=3.0,
    )


class Scraped(Opened, frozen=True):
    """A request whose tokens are looked up while Prometheus scrapes."""

    scrape: Callable[[], None] = lambda: None

    def num_cached_tokens(self, index: int) -> int:
        self.scrape()
        return super().num_cached_tokens(index)

    def num_host_tokens(self, index: int) -> int:
        self.scrape()
        return super().num_host_tokens(index)


def test_prompt_tokens_by_source_never_fall() -> None:
    """Whenever they are read: a counter that falls has begun anew, to Prometheus, and is added as a whole."""
    scrapes: list[list[float]] = []
    with build_driver() as driver:

        def scrape() -> None:
            found = values(exposed(driver))
            scrapes.append([value for name, value in found.items() if name.startswith("vllm:prompt_tokens")])

        request = OpenRequest(ActiveRequest(request_id="a", channel=QueueChannel()), "a")
        sequence = Sequence(
            "a", [1] * 9, SamplingParams(), frozenset(), max_tokens=9, seed=0, num_cached_tokens=8, num_host_tokens=3
        )
        opened = Scraped(request, [sequence], [], 9, SamplingParams(), scrape=scrape)
        for _ in range(2):
            SampleTimes(driver.request_metrics, opened, 0).add_tokens(1, 1.0)
        scrape()

    assert scrapes[-1] == [18, 16, 2, 10, 6]
    assert all(now >= before for early, late in pairwise(scrapes) for before, now in zip(early, late, strict=True))


def test_a_request_without_a_token_has_no_timings_and_one_with_a_single_one_no_rate() -> None:
    """Rather than a rate of something else."""
    request = OpenRequest(ActiveRequest(request_id="a", channel=QueueChannel()), "a", received_at=1.0)
    sequence = Sequence("a", [1], SamplingParams(), frozenset(), max_tokens=9, seed=0, scheduled_at=2.0)
    times = SampleTimes(RequestMetrics(300), Opened(request, [sequence], [], 1, SamplingParams()), 0)

    assert timings_of(request) is None
    times.add_tokens(1, 4.0)

    assert timings_of(request) == Timings(
        queue_time_s=1.0, prefill_time_s=2.0, time_to_first_token_s=3.0, decode_time_s=0.0, tokens_per_second=0.0
    )


def test_what_a_pause_holds_waits_and_says_why() -> None:
    """It is no load that the engine could take, and it is not nothing."""
    with build_driver() as driver:
        answer = QueueChannel()
        driver.operations.pause("pause", answer, "keep", clear_cache=False)
        next(iter(answer))
        for request_id in "abc":
            submit(driver, request_id, "four")
        while len(driver._execution.held) < 3:
            time.sleep(0.001)

        held = values(exposed(driver))
        driver.operations.resume("resume", QueueChannel())

    assert held["vllm:num_requests_waiting"] == held["vllm:num_requests_waiting_by_reason deferred"] == 3
    assert held["odriver_waiting_tokens"] == 12 and held["vllm:num_requests_waiting_by_reason capacity"] == 0


def test_the_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """At its end, with its id and how it went, and none for its tokens; also for one that was refused."""
    caplog.set_level(logging.DEBUG)
    with build_driver(max_queued_requests=10) as driver:
        list(submit(driver, "a", "ab", params={"max_tokens": 30}))
        error_of(submit(driver, "b", "ab", params={"top_p": 7}))

    first, second = (record for record in caplog.records if "request_id" in vars(record))
    assert (
        vars(first).items()
        >= {"request_id": "a", "finish_reason": "length", "prompt_tokens": 2, "completion_tokens": 30}.items()
    )
    assert {"seconds", "seconds_to_first_token"} <= vars(first).keys()
    assert first.getMessage().startswith("request a: length; ")
    assert vars(second).items() >= {"request_id": "b", "finish_reason": "invalid_request"}.items()
    assert "top_p" in second.getMessage()


@pytest.fixture
def wrong() -> list[str | None]:
    """What /health is to find; the last one holds."""
    return [None]


@pytest.fixture
def exposition() -> Exposition:
    """What /metrics is to show."""
    return Exposition()


@pytest.fixture
def server(wrong: list[str | None], exposition: Exposition) -> Iterator[MetricsServer]:
    """A server of metrics at a free port."""
    server = MetricsServer("127.0.0.1", 0, lambda: wrong[-1], exposition)
    server.start()
    yield server
    server.stop()


def get(url: str) -> tuple[int, str]:
    """Status and text."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health_are_served_over_http(
    server: MetricsServer, wrong: list[str | None], exposition: Exposition
) -> None:
    """Health is 200 or says what is wrong; there is nothing else."""
    assert get(f"{server.url}/health") == (200, "")
    wrong.append("starting")
    assert get(f"{server.url}/health") == (503, "starting\n")
    assert get(f"{server.url}/elsewhere")[0] == 404
    assert "process_resident_memory_bytes" in get(f"{server.url}/metrics")[1]

    with build_driver() as driver:
        exposition.add(DriverMetrics(driver, "parrot", {}))
        status, text = get(f"{server.url}/metrics")
        assert 'vllm:num_requests_running{engine="0",model_name="parrot"} 0.0' in exposition.text()

    assert status == 200 and 'vllm:num_requests_running{engine="0",model_name="parrot"} 0.0' in text


def test_a_port_that_is_taken_is_an_error_in_plain_words(server: MetricsServer) -> None:
    """It says for what."""
    port = int(server.url.rpartition(":")[2])

    with pytest.raises(AddressInUse, match=f"another program listens at http://127.0.0.1:{port}, for metrics"):
        MetricsServer("127.0.0.1", port, lambda: None, Exposition()).start()


def connected(server: MetricsServer) -> socket.socket:
    """A connection on which nothing is said yet."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(PATIENCE)
    return connection


def hung_up_on(connection: socket.socket) -> bool:
    """Whether there is nothing but an end to be heard."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stop_hangs_up_on_who_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It waits for nobody, and logs nothing."""
    server = MetricsServer("127.0.0.1", 0, lambda: None, Exposition())
    server.start()
    with connected(server) as idle:
        while not server._open:
            time.sleep(0.001)

        server.stop()

        assert not server._open and hung_up_on(idle)
    assert not caplog.records


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain;version=x;escaping=dots"])
def test_a_format_without_sense_is_answered_in_the_plain_one(server: MetricsServer, accept: str) -> None:
    """As one that is not ours."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accept})
    ) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"process_resident_memory_bytes" in response.read()


def test_a_metric_that_fails_is_an_answer_and_in_the_log(
    server: MetricsServer, exposition: Exposition, caplog: pytest.LogCaptureFixture
) -> None:
    """And /health is served all the same."""
    exposition.gauge("fails", "x", lambda: 1 / 0)

    assert get(f"{server.url}/metrics") == (500, "see the daemon's log\n")

    assert "ZeroDivisionError" in caplog.text
    assert get(f"{server.url}/health") == (200, "")


def test_an_ipv6_address_is_in_brackets() -> None:
    """In the address that a start prints, too."""
    assert MetricsServer("::1", 8001, lambda: None, Exposition()).url == "http://[::1]:8001"


def test_who_says_a_byte_now_and_then_is_hung_up_on(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is when the whole request is there, not when something last came."""
    monkeypatch.setattr(metrics_server, "DEADLINE", 0.2)

    with connected(server) as slow, pytest.raises(OSError):
        while True:
            slow.sendall(b"G")
            time.sleep(0.01)


def test_who_does_not_read_the_answer_is_hung_up_on(
    server: MetricsServer, exposition: Exposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it there is."""
    monkeypatch.setattr(metrics_server, "DEADLINE", 0.2)
    for number in range(300):
        exposition.gauge(f"g{number}", "x" * 100_000, lambda: 0.0)

    with connected(server) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        while server._open or not deaf.recv(1, socket.MSG_PEEK):
            time.sleep(0.01)


def test_a_scrape_is_answered_beside_more_connections_than_there_may_be(server: MetricsServer) -> None:
    """Those that have been open for longest are hung up on, and that is none of who asks in order."""
    idle = [connected(server) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        for _ in range(3):
            assert get(f"{server.url}/health") == (200, "")
        assert all(map(hung_up_on, idle[:MAX_CONNECTIONS]))
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"400"),
        (b"HEAD /health?x=y HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\na: " + b"b" * 20_000, b""),
    ],
)
def test_whatever_is_asked_is_answered_or_hung_up_on(server: MetricsServer, said: bytes, status: bytes) -> None:
    """And the next one is served."""
    with connected(server) as connection:
        connection.sendall(said)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(4096):
                answer += part

    assert answer[9:12] == status
    assert get(f"{server.url}/health") == (200, "")
