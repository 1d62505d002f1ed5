"""Requests over HTTP that go on at another replica where their daemon goes away."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeTokenizer
from gateways import CHAT, TEXT, chat, gateway
from test_client_resume import EXPECTED, PROMPTS, STEPS, MortalEngine

from driver.errors import Overloaded
from driver.odriver import oDriver
from driver.request import ActiveRequest
from engine.adapters.adapter import Adapter
from ipc.async_client import AsyncClient
from ipc.connection import retry
from ipc.gateway.access.callers import Callers
from ipc.gateway.upstream import remote_daemon
from ipc.gateway.upstream.remote_daemon import RemoteDaemon


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_daemon, "RETRY_INTERVAL", 0.01)
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.001)


@pytest.fixture
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[RemoteDaemon]:
    """Two, of which the first is asked first."""
    return build_replicas(tmp_path_factory, PATIENCE)


def build_replicas(tmp_path_factory: pytest.TempPathFactory, resume_timeout: float) -> list[RemoteDaemon]:
    """Two, whose requests are resumed within so many seconds."""
    addresses = [f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2)]
    return [RemoteDaemon(address, timeout=PATIENCE, resume_timeout=resume_timeout) for address in addresses]


class Pair(NamedTuple):
    """A gateway and its two daemons, of which each is ended by its ``end``."""

    http: httpx.Client
    first: FakeDriver
    second: FakeDriver
    end_first: Callable[[], None]
    end_second: Callable[[], None]


@contextmanager
def pair(
    replicas: list[RemoteDaemon], callers: Callers | None = None, other: dict[str, Any] | None = None, **options: Any
) -> Iterator[Pair]:
    """Both connected to; ``other`` are options of the second one alone."""
    first, second = FakeDriver(), FakeDriver()
    with ExitStack() as first_there, ExitStack() as second_there, gateway(*replicas, callers=callers) as http:
        first_there.enter_context(serving(replicas[0].address, first, **options))
        second_there.enter_context(serving(replicas[1].address, second, **options | (other or {})))
        until(lambda: all(replica.model for replica in replicas))
        yield Pair(http, first, second, first_there.close, second_there.close)


@contextmanager
def begun(http: httpx.Client, driver: FakeDriver, **fields: Any) -> Iterator[tuple[ActiveRequest, Iterator[str]]]:
    """A stream of which "once" has come: the request at the driver, and the lines that follow."""

    def say_once() -> ActiveRequest:
        driver.say(request := driver.take(), "once", [1])
        return request

    body = {"prompt": "hold", "model": "parrot", "stream": True} | fields
    with ThreadPoolExecutor(1) as thread:
        saying = thread.submit(say_once)
        with http.stream("POST", TEXT, json=body) as answer:
            lines = answer.iter_lines()
            assert any("once" in line for line in lines)
            yield saying.result(PATIENCE), lines


def until(holds: Callable[[], bool]) -> None:
    """Wait."""
    while not holds():
        pass


def told(lines: Iterator[str]) -> list[Any]:
    """The events that are left of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def reason(lines: Iterator[str]) -> str:
    """The last finish reason of the events that are left."""
    return str(told(lines)[-1]["choices"][0]["finish_reason"])


def test_a_stream_goes_on_at_another_replica(replicas: list[RemoteDaemon], caplog: pytest.LogCaptureFixture) -> None:
    """With the same seed and the tokens that there are. Its client sees one stream, in which the prompt counts once."""
    caplog.set_level("INFO", "ipc")
    with pair(replicas) as both, begun(both.http, both.first, stream_options={"include_usage": True}) as (asked, lines):
        both.end_first()
        resumed = both.second.take()
        both.second.say(resumed, " upon", [2])
        both.second.finish(resumed, "length", 2)
        *said, total = told(lines)

    assert (resumed.resume_token_ids, resumed.params) == ([[1]], asked.params)
    assert "".join(event["choices"][0]["text"] for event in said) == " upon"
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    assert (total["usage"]["prompt_tokens"], total["usage"]["completion_tokens"]) == (1, 2)
    assert f"went away: a request goes on at {replicas[1].address}" in caplog.text


def test_a_whole_answer_of_several_samples_does_too(replicas: list[RemoteDaemon]) -> None:
    """When its daemon stops in order. A sample that is whole is not told twice."""
    body = {"prompt": "hold", "model": "parrot", "n": 2}
    with pair(replicas) as both, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(both.http.post, TEXT, json=body)
        request = both.first.take()
        both.first.say(request, "a", [1])
        both.first.say(request, "b", [2], index=1, finish_reason="stop")
        both.first.stop("the operator said so")
        resumed = both.second.take()
        both.second.say(resumed, "", [], index=1, finish_reason="stop")
        both.second.say(resumed, "c", [3])
        both.second.finish(resumed, "stop", 3)
        choices = answer.result(PATIENCE).json()["choices"]

    assert resumed.resume_token_ids == [[1], [2]]
    assert [choice["text"] for choice in choices] == ["ac", "b"]


def test_a_conversation_does_too(replicas: list[RemoteDaemon]) -> None:
    """What the gateway has read of it is not read again."""
    with pair(replicas) as both, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(both.http.post, CHAT, json=chat("hold", model="parrot", logprobs=True))
        both.first.say(both.first.take(), "on", [1])
        both.end_first()
        resumed = both.second.take()
        both.second.say(resumed, "ce", [2])
        both.second.finish(resumed, "stop", 2)

        assert answer.result(PATIENCE).json()["choices"][0]["message"]["content"] == "once"


def test_who_hangs_up_has_it_aborted_where_it_is(replicas: list[RemoteDaemon]) -> None:
    """At the replica that goes on with it."""
    with pair(replicas) as both:
        with begun(both.http, both.first):
            both.end_first()
            resumed = both.second.take()

        assert both.second.aborted.get(timeout=PATIENCE) == resumed.request_id


def test_who_hangs_up_while_nobody_has_it_is_forgotten(replicas: list[RemoteDaemon]) -> None:
    """Whoever comes back is not asked."""
    with pair(replicas) as both:
        with begun(both.http, both.first):
            both.end_second()
            until(lambda: not replicas[1].client.is_connected)
            both.end_first()
            until(lambda: not replicas[0].client.is_connected)
        with serving(replicas[0].address, back := FakeDriver()):
            until(lambda: replicas[0].client.is_connected)
            assert both.http.post(TEXT, json={"prompt": "x", "model": "parrot"}).status_code == 200

    assert [request.prompt for request in back.submitted] == ["x"]


@pytest.mark.parametrize("number", [0, 1])
def test_whichever_is_back_first_goes_on(replicas: list[RemoteDaemon], number: int) -> None:
    """The one that began it or the other."""
    with pair(replicas) as both, begun(both.http, both.first) as (_, lines):
        both.end_second()
        until(lambda: not replicas[1].client.is_connected)
        both.end_first()
        with serving(replicas[number].address, back := FakeDriver()):
            back.finish(back.take(), "length", 1)

            assert reason(lines) == "length"


def test_it_goes_on_from_one_to_the_other_and_back(replicas: list[RemoteDaemon]) -> None:
    """With all tokens that there are by then."""
    with pair(replicas) as both, begun(both.http, both.first) as (_, lines):
        both.end_first()
        both.second.say(both.second.take(), " upon", [2])
        assert any("upon" in line for line in lines)
        with serving(replicas[0].address, back := FakeDriver()):
            both.end_second()
            back.finish(resumed := back.take(), "length", 1)

            assert reason(lines) == "length"
    assert resumed.resume_token_ids == [[1, 2]]


@pytest.mark.parametrize("other", [{"model": "owl"}, {"defaults": {"temperature": 0.5}}, {"fingerprint": "b"}])
def test_what_would_answer_otherwise_does_not_go_on(replicas: list[RemoteDaemon], other: dict[str, Any]) -> None:
    """Another model, or the same with other defaults or weights: the request waits for its own daemon."""
    with pair(replicas, other=other) as both, begun(both.http, both.first) as (_, lines):
        both.end_first()
        with serving(replicas[0].address, back := FakeDriver()):
            back.finish(back.take(), "length", 1)
            assert reason(lines) == "length"

        assert not both.second.submitted


def test_what_has_not_begun_goes_to_any_fingerprint(replicas: list[RemoteDaemon]) -> None:
    """Its first token decides who can go on with it from there."""
    body = {"prompt": "hold", "model": "parrot"}
    with pair(replicas, fingerprint="a", other={"fingerprint": "b"}) as both, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(both.http.post, TEXT, json=body)
        both.first.take()
        both.end_first()
        both.second.say(both.second.take(), "once", [1])
        with serving(replicas[0].address, other := FakeDriver(), fingerprint="a"):
            assert both.http.get("/v1/models").status_code == 200  # which looks for those that are away
            until(lambda: replicas[0].client.is_connected)
            both.end_second()
            with serving(replicas[1].address, back := FakeDriver(), fingerprint="b"):
                back.finish(resumed := back.take(), "length", 1)
                assert answer.result(PATIENCE).json()["choices"][0]["text"] == "once"

    assert (resumed.resume_token_ids, other.submitted) == ([[1]], [])


def test_what_comes_back_with_another_fingerprint_does_not_go_on(replicas: list[RemoteDaemon]) -> None:
    """Where no daemon is as the one that began, the request ends and says why."""
    with (
        pair(replicas, fingerprint="a", other={"fingerprint": "b"}) as both,
        begun(both.http, both.first) as (_, lines),
    ):
        both.end_first()
        with serving(replicas[0].address, FakeDriver(), fingerprint="b"):
            assert "(fingerprint b, and not a any more)" in told(lines)[-1]["error"]["message"]


@pytest.mark.parametrize("version", [1, 2])
def test_only_a_replica_with_the_same_weights_goes_on(replicas: list[RemoteDaemon], version: int) -> None:
    """As far as tokens were made with them: with others, the request waits for its own daemon."""
    with pair(replicas) as both, ThreadPoolExecutor(1) as thread:
        both.second.weight_version = version
        answer = thread.submit(both.http.post, TEXT, json={"prompt": "hold", "model": "parrot", "stream": True})
        both.first.say(both.first.take(), "once", [1], weight_versions=[(2, 0)])
        both.end_first()
        with serving(replicas[0].address, back := FakeDriver()):
            taker = both.second if version == 2 else back
            taker.finish(resumed := taker.take(), "length", 1)
            assert "length" in answer.result(PATIENCE).text

    assert resumed.resume_token_ids == [[1]]


@pytest.mark.parametrize("has_adapter", [True, False])
def test_only_a_replica_with_the_adapter_goes_on(replicas: list[RemoteDaemon], *, has_adapter: bool) -> None:
    """Without one, the request waits for its own daemon."""
    with pair(replicas, enable_lora=True) as both:
        back = FakeDriver()
        for driver in (both.first, both.second if has_adapter else back):
            driver.adapters.put("sales", Adapter(1, "sales", 8, ()), "sales", pin=False)
        with begun(both.http, both.first, model="sales") as (_, lines):
            both.end_first()
            with serving(replicas[0].address, back, enable_lora=True):
                taker = both.second if has_adapter else back
                taker.finish(resumed := taker.take(), "length", 1)
                assert reason(lines) == "length"

    assert (resumed.model, resumed.resume_token_ids) == ("sales", [[1]])


def test_what_may_end_its_daemons_ends_two_of_three(tmp_path: Path) -> None:
    """It waits for one of them, and the third serves others meanwhile."""
    replicas = [
        RemoteDaemon(f"ipc://{tmp_path}/{number}.sock", timeout=PATIENCE, resume_timeout=PATIENCE)
        for number in range(3)
    ]
    drivers = [FakeDriver() for _ in replicas]
    body = {"prompt": "hold", "model": "parrot"}
    with ExitStack() as last, gateway(*replicas) as http, ThreadPoolExecutor(1) as thread:
        ends = [last.enter_context(ExitStack()) for _ in replicas]
        for replica, driver, end in zip(replicas, drivers, ends, strict=True):
            end.enter_context(serving(replica.address, driver))
        until(lambda: all(replica.model for replica in replicas))
        answer = thread.submit(http.post, TEXT, json=body)
        taken = []
        for _ in range(2):
            until(lambda: any(not driver.held.empty() for driver in drivers))
            number = next(number for number, driver in enumerate(drivers) if not driver.held.empty())
            drivers[number].take()
            ends[number].close()
            taken.append(number)
        [third] = {0, 1, 2} - set(taken)
        assert http.post(TEXT, json=body | {"prompt": "x"}).status_code == 200
        with serving(replicas[taken[0]].address, back := FakeDriver()):
            back.finish(back.take(), "length", 0)
            assert answer.result(PATIENCE).status_code == 200

    assert [request.prompt for request in drivers[third].submitted] == ["x"]


def test_a_replica_that_hangs_keeps_no_adapters_from_others(
    replicas: list[RemoteDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a new request nor from one that goes on: it is not asked for longer than for its status."""

    async def hang() -> list[dict[str, Any]]:
        await asyncio.sleep(PATIENCE)
        return []

    with pair(replicas, enable_lora=True) as both:
        both.second.adapters.put("sales", Adapter(1, "sales", 8, ()), "sales", pin=False)
        monkeypatch.setattr(replicas[0].client, "adapters", hang)
        monkeypatch.setattr(remote_daemon, "STATUS_TIMEOUT", 0.1)
        answer = both.http.post(TEXT, json={"prompt": "x", "model": "sales"}, timeout=PATIENCE / 2)

    assert answer.status_code == 200
    assert [request.model for request in both.second.submitted] == ["sales"]


def test_a_request_that_no_replica_goes_on_with_in_time_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With what happened and how long was waited."""
    replicas = build_replicas(tmp_path_factory, 0.3)
    with pair(replicas) as both, begun(both.http, both.first) as (_, lines):
        both.end_second()
        until(lambda: not replicas[1].client.is_connected)
        both.end_first()

        assert "went away; within 0.3 s it could not be resumed" in told(lines)[-1]["error"]["message"]


def test_a_replica_that_has_too_much_to_do_is_asked_until_it_takes_it(replicas: list[RemoteDaemon]) -> None:
    """As the request was accepted once."""
    with pair(replicas) as both, begun(both.http, both.first) as (_, lines):
        both.second.refusal = Overloaded("too many wait")
        both.end_first()
        until(lambda: len(both.second.submitted) > 1)
        both.second.refusal = None
        both.second.finish(both.second.take(), "length", 1)

        assert reason(lines) == "length"


def test_a_replica_that_never_takes_it_is_not_asked_for_ever(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The error is that of a request which nobody goes on with in time."""
    replicas = build_replicas(tmp_path_factory, 0.1)
    with pair(replicas) as both, begun(both.http, both.first) as (_, lines):
        both.second.refusal = Overloaded("too many wait")
        both.end_first()

        assert "too many wait; within 0.1 s it could not be resumed" in told(lines)[-1]["error"]["message"]


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    """A file with a caller."""
    path = tmp_path / "api-keys.toml"
    path.write_text('[alice]\napi_key = "sk-alice-0123456789"\n')
    path.chmod(0o600)
    return path


def test_a_named_caller_goes_on_over_a_connection_of_its_own(replicas: list[RemoteDaemon], api_keys: Path) -> None:
    """There too the daemon tells it from others."""
    with pair(replicas, Callers(api_keys)) as both:
        both.http.headers["Authorization"] = "Bearer sk-alice-0123456789"
        with begun(both.http, both.first) as (asked, lines):
            both.end_first()
            both.second.finish(resumed := both.second.take(), "length", 1)
            assert reason(lines) == "length"

        assert (resumed.user, resumed.params) == (asked.user, asked.params)


def test_a_caller_whom_one_replica_does_not_connect_asks_another(
    replicas: list[RemoteDaemon], api_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, the first one's error is the answer."""
    with pair(replicas, Callers(api_keys)) as both:
        both.http.headers["Authorization"] = "Bearer sk-alice-0123456789"
        asked = {"prompt": "x", "model": "parrot"}
        nobody = AsyncClient(f"{replicas[0].address}.no", timeout=0.01)
        monkeypatch.setattr(replicas[0], "client_of", lambda _: nobody)
        assert [both.http.post(TEXT, json=asked).status_code for _ in range(2)] == [200, 200]
        both.end_second()
        until(lambda: not replicas[1].client.is_connected)

        assert "no daemon answers at" in both.http.post(TEXT, json=asked).json()["error"]["message"]
    assert len(both.second.submitted) == 2


def test_replicas_come_and_go_and_every_text_is_whole(
    replicas: list[RemoteDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half characters are cut and healed, at one and at the other."""
    monkeypatch.setattr(retry, "MAX_LOSSES", len(STEPS) + 1)

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "model": "parrot", "max_tokens": 100}
        return str(http.post(TEXT, json=body).raise_for_status().json()["choices"][0]["text"])

    with gateway(*replicas) as http, ThreadPoolExecutor(len(PROMPTS)) as threads, ExitStack() as there:
        for number, steps in enumerate((*STEPS, 10**6)):
            engine = MortalEngine(steps)
            driver = oDriver(engine, FakeTokenizer())
            driver.start()
            there.callback(driver.stop, "it is no more")
            there.callback(engine.ended.set)
            with ExitStack() as mortal:
                mortal.enter_context(serving(replicas[number % 2].address, driver))
                if number == 0:
                    until(lambda: replicas[0].client.is_connected)
                    answers = [threads.submit(ask, prompt) for prompt in PROMPTS]
                if steps in STEPS:
                    assert engine.spent.wait(PATIENCE)
                else:
                    assert [answer.result(PATIENCE) for answer in answers] == EXPECTED
