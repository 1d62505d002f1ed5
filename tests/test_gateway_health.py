"""What a gateway says of its daemons: models, health, readiness, metrics and tokens."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import msgspec
import pytest
from fake_driver import PATIENCE, WELCOME, FakeDriver, serving
from gateways import CHAT, TEXT, chat, gateway, once_reached
from prometheus_client.parser import text_string_to_metric_families
from test_client import Router

from driver.errors import Asleep, Draining, DriverError
from engine.adapters.adapter import Adapter
from ipc.gateway.endpoints.metrics import merged
from ipc.gateway.upstream import remote_daemon
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.wire.codec import encode
from ipc.wire.messages import Error, Hello, ListAdapters


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    """A client of a gateway whose daemon is not there yet, and has little time to answer."""
    with gateway(address, timeout=0.5) as client:
        yield client


def test_health_and_readiness_are_the_daemons(http: httpx.Client, address: str) -> None:
    """One that is not there is neither; one that is stuck is not healthy; one that drains is, but takes nothing."""
    assert [http.get(path).status_code for path in ("/health", "/ready", "/v1/models")] == [503, 503, 503]
    driver = FakeDriver()
    with serving(address, driver), gateway(address) as http:
        for state, stalled, codes in (
            ("serving", 0.0, [200, 200]),
            ("serving", 61.0, [503, 503]),
            ("draining", 0.0, [200, 503]),
        ):
            driver.state, driver.seconds_since_progress = state, stalled
            answers = [http.get(path) for path in ("/health", "/ready")]
            assert [answer.status_code for answer in answers] == codes
            told = answers[0].json()["daemons"]
            assert [(one["model"], one["state"]) for one in told] == [("parrot", "stalled" if stalled else state)]


def test_a_daemon_that_comes_late_is_found(http: httpx.Client, address: str) -> None:
    """And one that comes back with another model is known by that."""
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 503
    for model in ("parrot", "owl"):
        with serving(address, FakeDriver(), model=model):
            asked = {"prompt": "x", "model": model}
            assert once_reached(lambda: http.post(TEXT, json=asked)).json()["model"] == model  # noqa: B023


def test_open_requests_go_on_with_the_next_daemon(address: str) -> None:
    """One that is streamed and one that is not, as one answer each."""
    first, second = FakeDriver(), FakeDriver()
    with ThreadPoolExecutor(2) as threads, gateway(address, resume_timeout=PATIENCE) as http:
        with serving(address, first):
            whole = threads.submit(http.post, TEXT, json={"prompt": "hold", "seed": 8})
            first.take()
            threads.submit(lambda: first.say(first.take(), "once", [1]))
            answer = http.send(http.build_request("POST", CHAT, json=chat("hold", stream=True)), stream=True)
            lines = answer.iter_lines()
            assert any("once" in line for line in lines)
        with serving(address, second):
            for resumed in (second.take(), second.take()):
                assert resumed.resume_token_ids == ([[1]] if resumed.messages else [])
                second.say(resumed, " more", [2])
                second.finish(resumed, "length", 2)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            text = whole.result(PATIENCE).json()

    # The end comes with the text, or, where that was read before it, behind it.
    assert "".join(choice["delta"].get("content") or "" for event in rest for choice in event["choices"]) == " more"
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert (text["choices"][0]["text"], text["usage"]["completion_tokens"]) == (" more", 2)


def test_several_daemons_are_told_apart_by_their_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A request has to say which is meant; where only one of two is there, that one is served."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    with serving(first, FakeDriver(), metrics=lambda: "# HELP up u\n# TYPE up gauge\nup 1.0\n"):
        with serving(second, owl := FakeDriver(), model="owl"), gateway(first, second) as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["parrot", "owl"]
            assert http.post(TEXT, json={"prompt": "x", "model": "owl"}).json()["model"] == "owl"
            assert len(owl.submitted) == 1
            error = http.post(TEXT, json={"prompt": "x"}).json()["error"]
            assert error["param"] == "model" and "parrot and owl are served here" in error["message"]
            assert http.get("/metrics").text == f'# HELP up u\n# TYPE up gauge\nup{{daemon="{first}"}} 1.0\n'
        with gateway(first, second, timeout=0.5) as http:
            assert once_reached(lambda: http.post(TEXT, json={"prompt": "x", "model": "parrot"})).status_code == 200
            assert once_reached(lambda: http.get("/health")).status_code == 200


def test_a_daemon_that_goes_while_it_is_asked_is_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of what is asked of all: what the others say is the answer."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    there = FakeDriver()
    there.adapters.put("alice", Adapter(1, "alice", 8, ()), "alice", pin=False)
    with serving(first, there, enable_lora=True), ThreadPoolExecutor(1) as threads:
        for ask in (
            lambda http: http.get("/v1/models/alice"),
            lambda http: http.post(TEXT, json={"prompt": "x", "model": "alice"}),
        ):
            with gateway(first, second, resume_timeout=PATIENCE) as http:
                going = Router(second)
                answer = threads.submit(ask, http)
                assert isinstance(going.hear(), Hello)
                going.say(encode(msgspec.structs.replace(WELCOME, enable_lora=True)))
                assert isinstance(going.hear(), ListAdapters)
                going.say(encode(Error(None, "stopped", "the daemon ends")))
                going.die()
                assert answer.result(PATIENCE).status_code == 200


def test_daemons_of_one_model_take_turns(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And when one goes, the other takes all."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    going = RemoteDaemon(second, timeout=PATIENCE)
    with serving(first, one := FakeDriver()), gateway(first, going) as http:
        with serving(second, other := FakeDriver()):
            assert len(http.get("/metrics").text) == 0 and len(http.get("/v1/models").json()["data"]) == 1
            for _ in range(6):
                assert http.post(TEXT, json={"prompt": "x"}).status_code == 200
            assert len(one.submitted) == len(other.submitted) == 3
        while going.client._connection.is_up:  # until it has noticed
            pass
        for _ in range(3):  # nobody waits for it, who has PATIENCE to answer
            assert http.post(TEXT, json={"prompt": "x", "model": "parrot"}).status_code == 200
            assert len(http.get("/v1/models").json()["data"]) == 1
        assert len(one.submitted) == 6
        with serving(second, back := FakeDriver()):  # it has its turn again when it is back
            while not back.submitted:
                assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


def test_the_daemons_of_each_model_take_turns_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where requests for one and for the other alternate."""
    drivers = {f"ipc://{tmp_path_factory.mktemp('d')}/o.sock": FakeDriver() for _ in range(4)}
    with ExitStack() as there:
        for number, (address, driver) in enumerate(drivers.items()):
            there.enter_context(serving(address, driver, model=("parrot", "owl")[number // 2]))
        http = there.enter_context(gateway(*drivers))
        assert len(http.get("/v1/models").json()["data"]) == 2
        for _ in range(2):
            for model in ("parrot", "owl"):
                http.post(TEXT, json={"prompt": "x", "model": model}).raise_for_status()

    assert [len(driver.submitted) for driver in drivers.values()] == [1] * 4


@pytest.mark.parametrize("refusal", [Draining("it drains"), Asleep("it sleeps")])
def test_a_daemon_that_takes_nothing_new_is_spared_until_it_does(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, refusal: DriverError
) -> None:
    """Who finds out is passed on to another, where open requests are resumed; where there is no other everybody is to
    come again."""
    monkeypatch.setattr(remote_daemon, "RETRY_INTERVAL", 0.01)
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    remote = [RemoteDaemon(address, timeout=PATIENCE, resume_timeout=PATIENCE) for address in (first, second)]
    resting = FakeDriver()
    resting.refusal, resting.state = refusal, refusal.code

    def ask() -> int:
        return http.post(TEXT, json={"prompt": "x", "model": "parrot"}).status_code

    with serving(first, resting), gateway(*remote) as http:
        with serving(second, FakeDriver()):
            while any(daemon.model is None for daemon in remote):
                pass
            assert [ask() for _ in range(6)] == [200] * 6 and len(resting.submitted) == 1
        while remote[1].client._connection.is_up:
            pass
        answer = http.post(TEXT, json={"prompt": "x"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["code"] == refusal.code
        with serving(second, FakeDriver()):
            while ask() != 200:
                pass
            count = len(resting.submitted)
            resting.refusal, resting.state = None, "serving"
            while len(resting.submitted) == count:
                assert ask() == 200


def test_of_daemons_that_are_away_whichever_is_back_first_serves(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nobody waits for the other, who has PATIENCE to answer; whose turn it is does not matter."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    for back in (first, second):
        remote = [RemoteDaemon(address, timeout=PATIENCE) for address in (first, second)]
        with gateway(*remote) as http:
            with serving(first, FakeDriver()), serving(second, FakeDriver()):
                assert len(http.get("/v1/models").json()["data"]) == 1
                http.post(TEXT, json={"prompt": "x", "model": "parrot"}).raise_for_status()
            while any(daemon.client._connection.is_up for daemon in remote):
                pass
            with serving(back, FakeDriver()):
                assert http.post(TEXT, json={"prompt": "x", "model": "parrot"}).status_code == 200


def test_one_that_is_away_is_not_waited_for_by_whoever_asks_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also when no completion has found out that it is: it has PATIENCE to answer."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    going = RemoteDaemon(second, timeout=PATIENCE)
    with serving(first, FakeDriver()), gateway(first, going) as http:
        with serving(second, FakeDriver(), model="owl"):
            assert len(http.get("/v1/models").json()["data"]) == 2
        while going.client._connection.is_up:
            pass
        told = http.get("/health").json()["daemons"]
        assert [(one["model"], one["state"]) for one in told] == [("parrot", "serving"), ("owl", "unreachable")]
        assert len(http.get("/v1/models").json()["data"]) == 1
        assert http.get("/metrics").status_code == 200
        assert http.post(TEXT, json={"prompt": "x"}).json()["model"] == "parrot"
        assert http.post(TEXT, json={"prompt": "x", "model": "jay"}).status_code == 404


def test_a_model_whose_daemon_is_away_is_to_be_asked_for_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is no model that is not served, whichever others are."""
    first, second = (f"ipc://{tmp_path_factory.mktemp('d')}/o.sock" for _ in range(2))
    going = RemoteDaemon(second, timeout=0.5)
    with serving(first, FakeDriver()), gateway(first, going) as http:
        with serving(second, FakeDriver(), model="owl"):
            while going.model is None:
                pass
        while going.client._connection.is_up:
            pass
        refused = http.post(TEXT, json={"prompt": "x", "model": "owl"})

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json()["error"]["message"].startswith(f"no daemon answers at {second}")


def test_one_daemons_metrics_are_passed_on_as_they_are(address: str) -> None:
    """In Prometheus's content type."""
    with serving(address, FakeDriver(), metrics=lambda: "up 1.0\n"), gateway(address) as http:
        answer = http.get("/metrics")
    assert answer.text == "up 1.0\n" and answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_metrics_of_several_are_one_text() -> None:
    """A family stands together, with its help and type once, whichever daemon has it."""
    texts = {
        name: f'# HELP a_total x\n# TYPE a_total counter\na_total{{k="v"}} {value}.0\n'
        for name, value in (("m", 1), ("n", 2))
    }
    texts["n"] += "# HELP b y\n# TYPE b gauge\nb 3\n"

    assert merged(texts).splitlines() == [
        "# HELP a_total x",
        "# TYPE a_total counter",
        'a_total{daemon="m",k="v"} 1.0',
        'a_total{daemon="n",k="v"} 2.0',
        "# HELP b y",
        "# TYPE b gauge",
        'b{daemon="n"} 3.0',
    ]


def test_an_address_is_a_label_whatever_it_is_made_of() -> None:
    """Quotes, backslashes and newlines make no label and no sample of their own, and no label of a daemon's is lost."""
    address = 'ipc:///tmp/a"} 7\nup{x="\\o.sock'
    texts = {address: 'up{k="a, \\"b\\" } 1"} 1.0\n', "tcp://127.0.0.1:1": "up 2.0\n"}

    (family,) = text_string_to_metric_families(merged(texts))

    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"daemon": address, "k": 'a, "b" } 1'}, 1.0), ({"daemon": "tcp://127.0.0.1:1"}, 2.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("driver")
def test_tokens_are_told_as_vllm_tells_them(http: httpx.Client) -> None:
    """Of a prompt and of a conversation, and back."""
    assert http.post("/tokenize", json={"prompt": "one three", "model": "parrot"}).json() == {
        "count": 2,
        "max_model_len": 256,
        "tokens": [3, 5],
    }
    assert http.post("/tokenize", json=chat("what is it", add_generation_prompt=False)).json()["tokens"] == [4, 2, 2]
    assert http.post("/detokenize", json={"tokens": [3, 5]}).json() == {"prompt": "xxx xxxxx"}
    assert http.get("/tokenizer_info").json()["model_max_length"] == 256
    refused = http.post("/tokenize", json=chat("x", add_special_tokens=True))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "add_special_tokens"
