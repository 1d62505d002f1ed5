"""Pages of other origins at a gateway, as a browser asks for them (CORS)."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_driver import FakeDriver
from gateways import CHAT, chat, events, gateway
from test_gateway_access import ALICE, FILE, bearer

from engine.errors import ConfigurationError
from ipc.gateway.access.callers import Callers
from ipc.gateway.access.cross_origin import cross_origin
from ipc.service.http_config import HttpConfig

OURS, OTHERS = "https://chat.example.org", "https://elsewhere.example.org"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def allowed(answer: httpx.Response) -> str | None:
    """The origin whose pages may read it."""
    return answer.headers.get("Access-Control-Allow-Origin")


@pytest.fixture
def http(address: str, driver: FakeDriver, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a gateway with API keys, for pages of ours."""
    del driver
    path = tmp_path / "api-keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    around = cross_origin([OURS], [], [], credentials=False)
    with gateway(address, callers=Callers(path), around=around) as client:
        yield client


def test_a_browser_is_told_before_it_asks(http: httpx.Client) -> None:
    """Without a key, which it does not send then; pages of others are turned away."""
    ours, others = (http.options(CHAT, headers={"Origin": origin, **PREFLIGHT}) for origin in (OURS, OTHERS))

    assert (ours.status_code, allowed(ours)) == (200, OURS)
    assert "POST" in ours.headers["Access-Control-Allow-Methods"]
    assert ours.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "Access-Control-Allow-Credentials" not in ours.headers
    assert (others.status_code, allowed(others)) == (400, None)


def test_a_page_may_read_whatever_is_answered(http: httpx.Client) -> None:
    """Whole and streamed answers, and why there is none; all to nobody else's pages, and to programs as ever."""
    ours = bearer(ALICE) | {"Origin": OURS}

    answers = [
        http.post(CHAT, json=chat("x"), headers=ours),
        http.post(CHAT, json=chat("x"), headers={"Origin": OURS}),
        http.get("/v1/nothing", headers=ours),
        http.get(CHAT, headers=ours),
        http.post(CHAT, json={}, headers=ours),
    ]
    with http.stream("POST", CHAT, json=chat("x y", stream=True), headers=ours) as streamed:
        streamed.read()

    assert [answer.status_code for answer in answers] == [200, 401, 404, 405, 400]
    assert {allowed(answer) for answer in [*answers, streamed]} == {OURS} and events(streamed)
    assert all("Origin" in answer.headers["Vary"] for answer in answers)
    assert allowed(http.post(CHAT, json=chat("x"), headers=ours | {"Origin": OTHERS})) is None
    assert http.post(CHAT, json=chat("x"), headers=bearer(ALICE)).status_code == 200


def test_nobody_is_let_in_unless_the_operator_says_whom(address: str, driver: FakeDriver) -> None:
    """By default there are no such headers; with "*" all pages may read."""
    del driver
    with gateway(address) as http:
        asked = http.options(CHAT, headers={"Origin": OURS, **PREFLIGHT})
        assert asked.status_code == 405 and allowed(asked) is None
        assert allowed(http.post(CHAT, json=chat("x"), headers={"Origin": OURS})) is None
    with gateway(address, around=cross_origin(["*"], ["POST"], ["content-type"], credentials=False)) as http:
        assert allowed(http.post(CHAT, json=chat("x"), headers={"Origin": OTHERS})) == "*"
        refused = http.options(CHAT, headers={"Origin": OURS, **PREFLIGHT, "Access-Control-Request-Method": "DELETE"})
        assert refused.status_code == 400 and "method" in refused.text


@pytest.mark.parametrize(
    "origin",
    [
        *('["*"]', "chat.example.org", "https://chat.example.org/page", "https://", "", "null"),
        *(
            "https://*.example.org",
            "https://Chat.example.org",
            "https://chat.example.org:443",
            "http://a.org,http://b.org",
        ),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """It would never be equal to one that is sent."""
    with pytest.raises(ConfigurationError, match="allowed_origins must be as a browser sends them"):
        HttpConfig(allowed_origins=(origin,))


def test_what_is_allowed_to_nobody_is_a_mistake() -> None:
    """The other settings are of the origins."""
    HttpConfig(allowed_origins=("*", "http://[::1]:3000", "chrome-extension://abc"), allow_credentials=True)
    with pytest.raises(ConfigurationError, match="allowed_methods must be in capital letters, such as POST"):
        HttpConfig(allowed_origins=("*",), allowed_methods=("GET", "post"))
    with pytest.raises(
        ConfigurationError, match="allow_credentials is for pages of other origins: set allowed_origins"
    ):
        HttpConfig(allow_credentials=True)
