"""Who may ask a gateway, how often, and how much at once."""

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import CHAT, TEXT, chat, gateway

from ipc.commands.cli import main
from ipc.errors import KeyFileError
from ipc.gateway import http_protocol as protocol
from ipc.gateway.access.api_keys import ApiKey
from ipc.gateway.access.callers import Caller, Callers, TooMany, Unauthorized
from ipc.gateway.bodies import MAX_BODY_BYTES
from ipc.gateway.http_protocol import MAX_HEAD_BYTES
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.sockets.auth import Authority
from ipc.wire import keys

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
FILE = f"""
[alice]
api_key = "{ALICE}"
max_requests = 1

[bob]
api_key = "{BOB}"
requests_per_minute = 2
"""


def bearer(api_key: str) -> dict[str, str]:
    """The header that says who asks."""
    return {"Authorization": f"Bearer {api_key}"}


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    """A file of API keys that its owner alone may read."""
    path = tmp_path / "api-keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.fixture
def http(address: str, driver: FakeDriver, api_keys: Path) -> Iterator[httpx.Client]:
    """A client of a gateway that asks for API keys."""
    del driver
    with gateway(address, callers=Callers(api_keys)) as client:
        yield client


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic eA=="}, bearer(ALICE[:-1]), {"Authorization": "Bearer"}]
)
def test_nobody_asks_without_a_key_of_the_file(http: httpx.Client, driver: FakeDriver, headers: dict[str, str]) -> None:
    """Wherever a daemon would be asked; page, health and API description are open."""
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/tokenizer_info")):
        answer = http.request(method, path, headers=headers, json=chat("x"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert not driver.submitted
    assert [http.get(path).status_code for path in ("/", "/health", "/ready", "/openapi.json")] == [200] * 4


def test_callers_are_held_apart(http: httpx.Client, driver: FakeDriver) -> None:
    """The daemon sees a client each, and whose prompts begin alike share no pages, but those of one."""
    for name, salt in ((ALICE, ""), (ALICE, "x"), (ALICE, ""), (BOB, "")):
        body = {"prompt": "x", "cache_salt": salt}
        assert http.post(TEXT, json=body, headers=bearer(name)).status_code == 200

    one, other, same, bob = driver.submitted
    assert one.client == other.client == same.client != bob.client
    assert one.params == same.params and len({one.params["cache_salt"] for one in (one, other, bob)}) == 3


def test_a_salt_is_nothing_that_others_could_ask_for(address: str, driver: FakeDriver, api_keys: Path) -> None:
    """Who knows a caller's name, and may choose any salt at the daemon, finds none of its pages."""
    callers = Callers(api_keys)
    with gateway(address, callers=callers) as http:
        for api_key in (BOB, f"{BOB}-2"):
            api_keys.write_text(FILE.replace(BOB, api_key))
            callers.reload()
            assert http.post(TEXT, json={"prompt": "x"}, headers=bearer(api_key)).status_code == 200

    one, other = (request.params["cache_salt"] for request in driver.submitted)
    assert one != other


def test_a_caller_has_the_name_that_its_key_has_at_the_daemon(tmp_path: Path, address: str, api_keys: Path) -> None:
    """Its own if there is one, else the gateway's; a key that the daemon does not know is an error of that caller."""
    for name in ("alice", "gate"):
        keys.new(tmp_path / "keys", name, tmp_path / f"{name}.key", control=name == "gate")
    keys.new(tmp_path / "elsewhere", "carol", tmp_path / "carol.key")
    entry = '[carol]\napi_key = "sk-carol-0123456789"\nkey = "carol.key"\n'
    api_keys.write_text(FILE.replace("max_requests = 1", 'key = "alice.key"') + entry)
    driver = FakeDriver()
    own = tmp_path / "gate.key"
    with (
        serving(address, driver, authority=Authority(tmp_path / "keys")),
        gateway(address, timeout=2, callers=Callers(api_keys, own), key=own) as http,  # which carol takes
    ):
        answers = [
            http.post(TEXT, json={"prompt": "x"}, headers=bearer(one)) for one in (ALICE, BOB, "sk-carol-0123456789")
        ]
        healthy = http.get("/health").status_code

    assert [answer.status_code for answer in answers] == [200, 200, 503] and healthy == 200
    assert [request.tenant for request in driver.submitted] == ["alice", "gate"]
    assert "cache_salt" not in driver.submitted[0].params and "cache_salt" in driver.submitted[1].params


@pytest.mark.parametrize("stream", [False, True])
def test_requests_open_at_once_are_counted(http: httpx.Client, driver: FakeDriver, stream: bool) -> None:
    """Until their end; another's are not."""
    body = chat("hold", stream=stream)
    asking = threading.Thread(target=lambda: http.post(CHAT, json=body, headers=bearer(ALICE)))
    asking.start()
    request = driver.take()

    assert http.post(CHAT, json=chat("x"), headers=bearer(ALICE)).status_code == 429
    assert http.post(CHAT, json=chat("x"), headers=bearer(BOB)).status_code == 200
    driver.finish(request)
    asking.join()
    assert http.post(CHAT, json=chat("x"), headers=bearer(ALICE)).status_code == 200


def test_requests_a_minute_are_counted(http: httpx.Client) -> None:
    """More of them are told when to come again; to look around is not to ask."""
    assert {http.get("/v1/models", headers=bearer(BOB)).status_code for _ in range(3)} == {200}
    codes = [http.post(CHAT, json=chat("x"), headers=bearer(BOB)) for _ in range(3)]

    assert [answer.status_code for answer in codes] == [200, 200, 429]
    assert 1 <= int(codes[-1].headers["Retry-After"]) <= 30
    assert codes[-1].json()["error"]["type"] == "rate_limit_error"


def test_a_caller_goes_before_others_only_where_the_file_says_so(
    address: str, driver: FakeDriver, api_keys: Path
) -> None:
    """Whatever the gateway itself may; without a file of keys all are one."""
    api_keys.write_text(FILE.replace("max_requests = 1", "least_priority = -3").replace("requests_per_minute = 2", ""))
    with gateway(address, callers=Callers(api_keys)) as http:
        answers = [
            http.post(CHAT, json=chat("x", priority=priority), headers=bearer(name))
            for name, priority in ((ALICE, -3), (ALICE, -4), (BOB, -1), (BOB, 0), (BOB, 7))
        ]
    with gateway(address) as http:
        assert http.post(CHAT, json=chat("x", priority=-4)).status_code == 200

    assert [answer.status_code for answer in answers] == [200, 403, 403, 200, 200]
    assert answers[1].json()["error"]["param"] == "priority"
    assert [request.params["priority"] for request in driver.submitted] == [-3, 0, 7, -4]


def test_nobody_is_kept_by_their_connection(address: str, api_keys: Path) -> None:
    """Who has gone leaves no thread behind."""
    daemon = RemoteDaemon(address)
    caller = Callers(api_keys).identified(f"Bearer {ALICE}")
    client = weakref.ref(daemon.client_of(caller))

    del caller
    gc.collect()

    assert client() is None and not daemon._clients
    asyncio.run(daemon.close())


def test_an_allowance_comes_back_with_time() -> None:
    """As much as there was at most."""
    caller = Caller("bob", ApiKey(BOB, requests_per_minute=2), None)
    for now in (0.0, 0.0, 30.0, 500.0, 500.0):
        caller.begin(now)
    with pytest.raises(TooMany, match="bob may ask 2 times a minute") as refusal:
        caller.begin(515.0)
    assert refusal.value.retry_after == pytest.approx(15)
    caller.begin(530.0)


def test_one_request_too_many_is_refused_until_another_ends() -> None:
    """However many have ended before."""
    caller = Caller("alice", ApiKey(ALICE, max_requests=1), None)
    for _ in range(3):
        caller.begin(0.0)
        with pytest.raises(TooMany, match="1 requests open"):
            caller.begin(0.0)
        caller.end()


def test_keys_are_read_again(api_keys: Path) -> None:
    """Who is gone is not known any more, who stayed has used what they have used, a file that is wrong changes nothing."""
    known = Callers(api_keys)
    bob = known.identified(f"Bearer {BOB}")
    api_keys.write_text(FILE.replace(ALICE, "sk-another-0123456789"))
    assert known.reload() == "2 API keys are known"
    assert known.identified(f"bearer {BOB}") is bob
    with pytest.raises(Unauthorized):
        known.identified(f"Bearer {ALICE}")
    api_keys.write_text(FILE.replace("[bob]", '[bob]\nkey = "bob.key"'))
    known.reload()
    assert bob.is_removed and not known.identified(f"bearer {BOB}").is_removed
    bob = known.identified(f"bearer {BOB}")
    api_keys.write_text("nonsense")
    with pytest.raises(KeyFileError, match="holds no API keys"):
        known.reload()
    assert known.identified(f"Bearer {BOB}") is bob


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_taken_out_of_the_file_is_answered_no_more(
    address: str, driver: FakeDriver, api_keys: Path, stream: bool
) -> None:
    """What is open ends with the reason, and is aborted; others, and whose limits alone change, go on."""
    callers = Callers(api_keys)
    answers: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        answers[name] = http.post(CHAT, json=chat("hold", stream=stream), headers=bearer(name))

    with gateway(address, callers=callers) as http:
        threads = {name: threading.Thread(target=ask, args=(name,)) for name in (ALICE, BOB)}
        threads[ALICE].start()
        of_alice = driver.take()
        threads[BOB].start()
        of_bob = driver.take()
        driver.say(of_alice, "a", [1])
        driver.say(of_bob, "a", [1])
        left = FILE.partition("[bob]")[2].replace("= 2", "= 5")
        api_keys.write_text("[bob]" + left)
        loop = callers.identified(bearer(BOB)["Authorization"])._working.copy().pop().get_loop()
        loop.call_soon_threadsafe(callers.reload)
        threads[ALICE].join(PATIENCE)
        assert driver.aborted.get(timeout=PATIENCE) == of_alice.request_id
        driver.finish(of_bob)
        threads[BOB].join(PATIENCE)
    if stream:
        assert "not known here, or not any more" in answers[ALICE].text
    else:
        assert answers[ALICE].status_code == 401
    assert answers[BOB].status_code == 200 and "not any more" not in answers[BOB].text


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (FILE, 0o644, "chmod 600"),
        (FILE + "x", 0o600, "holds no API keys"),
        (FILE.replace("api_key", "apikey"), 0o600, "holds no API keys"),
        (
            FILE.replace(ALICE, "short"),
            0o600,
            r"holds no API keys: in \[alice\], api_key must be 16 to 512 characters of ASCII without spaces$",
        ),
        (
            FILE + "max_requests = 0\n",
            0o600,
            r"in \[bob\], Expected `int` >= 1 - at `\$.max_requests`",
        ),
        (FILE.replace(ALICE, BOB), 0o600, "the same API key"),
        (FILE.replace("[bob]", '["b b"]'), 0o600, "'b b' is no name"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(api_keys: Path, text: str, mode: int, words: str) -> None:
    """With the file and what is wrong with it."""
    api_keys.write_text(text)
    api_keys.chmod(mode)
    with pytest.raises(KeyFileError, match=words):
        Callers(api_keys)


@pytest.mark.usefixtures("driver")
def test_without_keys_a_gateway_is_localhosts_alone(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No other address is served without keys, and no name that a page elsewhere may have been given."""
    with gateway(address) as http:
        for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example:80", 403)):
            assert http.get("/v1/models", headers={"Host": host}).status_code == status
    assert main(["gateway", "--connect", address, "--host", "0.0.0.0"]) == 78
    assert "--api-keys FILE" in capsys.readouterr().err


@pytest.mark.parametrize("head", [b"GET /%b HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: %b", b"GET / HTTP/1.1\r\n%b"])
def test_a_head_that_is_too_long_is_refused(http: httpx.Client, head: bytes) -> None:
    """A first line, a header, or very many, before a key is asked for."""
    filling = b"X: y\r\n" if head.endswith(b"\n%b") else b"y"
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
        connection.sendall(head % (filling * (MAX_HEAD_BYTES // len(filling) + 1)))
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_head_that_does_not_come_is_not_waited_for(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the rest of one; who is answered is waited for as before."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.1)
    for beginning in (b"", b"GET / HT"):
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
            connection.sendall(beginning)
            assert connection.recv(1000) == b""
    answer = None
    while answer is None:
        with suppress(httpx.TransportError):  # a busy machine may be slower than that
            answer = http.get("/health")
    assert answer.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_not_read(http: httpx.Client, driver: FakeDriver, declared: bool) -> None:
    """Whether its length is said before or not."""
    content = b" " * (MAX_BODY_BYTES + 1)
    headers = {"Content-Type": "application/json", **bearer(BOB)}

    answer = http.post(TEXT, content=content if declared else iter([content]), headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "message_too_long")
    assert not driver.submitted
