"""What a peer may hold of a gateway: connections, memory and time."""

import itertools
import socket
import struct
from collections.abc import Iterator

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver
from gateways import CHAT, TEXT, chat, gateway

from driver.request import Logprob, ReturnSample
from ipc.gateway.access import memory_limit as memory
from ipc.gateway.access import pace
from ipc.gateway.access.connection_limit import ConnectionLimit
from ipc.gateway.access.memory_limit import Full, Memory
from ipc.gateway.access.pace import BODY_RATE, BODY_TIMEOUT, SEND_BYTES, SEND_PERIODS, BodyPace, SendPace
from ipc.gateway.access.peer_addresses import TrustedProxies, peer_of
from ipc.gateway.http_protocol import MAX_AHEAD

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def http(address: str, driver: FakeDriver) -> Iterator[httpx.Client]:
    """A client of a gateway."""
    del driver
    with gateway(address) as client:
        yield client


def connect(http: httpx.Client, beginning: bytes = b"", *, reads: bool = True) -> socket.socket:
    """A connection to the gateway on which this has been said; one that does not read has room for next to nothing."""
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    if not reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((http.base_url.host, http.base_url.port or 0))
    connection.sendall(beginning)
    return connection


def post(body: bytes) -> bytes:
    """A request."""
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def rest_of(connection: socket.socket) -> bytes:
    """What is said on it until it is closed, in whatever way."""
    said = b""
    try:
        while data := connection.recv(1 << 16):
            said += data
    except ConnectionResetError:
        pass
    connection.close()
    return said


# Connections.


class Place:
    """A connection that can be told to give way."""

    def __init__(self, limit: ConnectionLimit, peer: str = "a") -> None:
        self.host = self.peer = peer
        self.gave_way = False
        self.admitted = limit.admit(self)

    def give_way(self) -> None:
        self.gave_way = True


def test_the_connection_that_has_waited_longest_gives_way() -> None:
    """For a new one where all places are taken; those whose requests are being answered never do."""
    limit = ConnectionLimit(3)
    working, first, second = Place(limit, "a"), Place(limit, "b"), Place(limit, "c")
    limit.work(working)
    limit.work(first)
    limit.wait(first)  # which now has waited for less long than the second

    third, fourth = Place(limit, "d"), Place(limit, "e")
    assert third.admitted and fourth.admitted
    assert [place.gave_way for place in (working, first, second, third)] == [False, True, True, False]
    limit.work(third)
    limit.work(fourth)
    assert not Place(limit, "f").admitted
    limit.remove(third)
    assert Place(limit, "f").admitted
    assert len(limit) == 3


def test_a_peer_has_half_of_all_connections() -> None:
    """Beyond that its own give way, or it is refused, and another gets in; a trusted proxy speaks for many."""
    limit = ConnectionLimit(4, {"proxy"}.__contains__)
    hogs = [Place(limit, "hog") for _ in range(3)]
    for hog in hogs:
        limit.work(hog)

    assert [hog.gave_way for hog in hogs] == [True, False, False]
    assert not Place(limit, "hog").admitted
    assert Place(limit, "late").admitted
    limit = ConnectionLimit(4, {"proxy"}.__contains__)
    assert [Place(limit, "proxy").gave_way for _ in range(4)] == [False] * 4


def test_who_is_refused_or_gone_takes_no_place() -> None:
    """However often a connection is said to have ended."""
    limit = ConnectionLimit(2)
    first, second = Place(limit, "a"), Place(limit, "b")
    limit.work(first)
    limit.work(second)
    refused = Place(limit, "c")
    for place in (refused, first, first):
        limit.remove(place)
        limit.wait(place)

    assert len(limit) == 1
    assert Place(limit, "a").admitted


def test_peers_are_told_apart_by_address() -> None:
    """An IPv6 peer has a network for itself; what is no address is itself."""
    assert peer_of("10.0.0.1") != peer_of("10.0.0.2")
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:0:0:1") != peer_of("2001:db8:0:1::1")
    assert peer_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert (peer_of("testclient"), peer_of("")) == ("testclient", "")
    trusted = TrustedProxies(["10.0.0.0/8", "2001:db8::1"])
    assert [host in trusted for host in ("10.1.2.3", "11.0.0.1", "2001:db8::1", "2001:db8::2", "x")] == [
        True,
        False,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="nonsense"):
        TrustedProxies(["nonsense"])


def test_a_connection_that_waits_gives_way_over_http(address: str, driver: FakeDriver) -> None:
    """Half-sent requests, whatever part has come, lock nobody out; where all are answered the next hears 503."""
    with gateway(address, limit=ConnectionLimit(8)) as http:
        half_sent = [
            connect(http, b"" if number % 2 else HEAD + b"Content-Length: 100\r\n\r\n{") for number in range(20)
        ]
        with httpx.Client(base_url=http.base_url, headers={"Connection": "close"}, timeout=PATIENCE) as late:
            assert late.post(TEXT, json={"prompt": "x"}).status_code == 200
        working = [connect(http, post(b'{"prompt": "hold"}')) for _ in range(4)]
        requests = [driver.take() for _ in working]

        refused = rest_of(connect(http))
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"overloaded"' in refused
        for request in requests:
            driver.finish(request)
        assert all(connection.recv(1000).startswith(b"HTTP/1.1 200 ") for connection in working)
        answers = [rest_of(connection) for connection in half_sent[:12]]
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        for connection in (*working, *half_sent):
            connection.close()


# Time.


def test_a_body_has_time_by_its_length() -> None:
    """A while, and more for what has come: one that is long and steady is not cut off, one that stops is."""
    body = BodyPace(now=100.0)
    assert body.deadline() == 100.0 + BODY_TIMEOUT
    body.receive(10 * BODY_RATE)
    assert body.deadline() == 110.0 + BODY_TIMEOUT


def test_an_answer_leaves_at_some_pace() -> None:
    """So much each time that one looks, or all that is left; a long one in so many times."""
    sending = SendPace(3 * SEND_BYTES)
    assert [sending.is_too_slow(left * SEND_BYTES) for left in (2, 1, 1)] == [False, False, True]
    sending = SendPace(100)
    assert (sending.is_too_slow(0), SendPace(100).is_too_slow(50)) == (False, True)
    whole = 1000 * SEND_BYTES
    assert SendPace(whole).is_too_slow(whole - SEND_BYTES)
    assert not SendPace(whole).is_too_slow(whole - whole // SEND_PERIODS)


def test_a_body_that_does_not_come_is_not_waited_for(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered 408, and the connection closed; what has been asked whole is waited for as before."""
    monkeypatch.setattr(pace, "BODY_TIMEOUT", 0.1)

    for head in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n"):
        answer = rest_of(connect(http, HEAD + head))
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"timeout"' in answer

    with connect(http, post(b'{"prompt": "x"}')) as whole:
        assert whole.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_reader_who_stops_ends_its_request(
    http: httpx.Client, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """A stream's work is aborted, and the connection ended."""
    monkeypatch.setattr(pace, "SEND_TIMEOUT", 0.2)
    body = b'{"prompt": [%b], "stream": true}' % b", ".join([b'"hold"'] * prompts)
    connection = connect(http, post(body), reads=False)
    requests = [driver.take() for _ in range(prompts)]

    for number in itertools.count():
        if not driver.aborted.empty():
            break
        if requests[0].request_id in driver.open:
            driver.say(requests[0], "x" * 100_000, [number])
        http.get("/health")
    for _ in requests:
        driver.aborted.get(timeout=PATIENCE)
    connection.close()


def test_a_whole_answer_that_is_not_read_is_not_kept(
    address: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as held until it is away; its connection is ended when its reader stops, and others are served."""
    monkeypatch.setattr(pace, "SEND_TIMEOUT", 0.2)
    monkeypatch.setattr(memory, "MAX_BYTES", 50 << 20)
    with gateway(address) as http:
        connection = connect(http, post(b'{"prompt": "hold"}'), reads=False)
        request = driver.take()
        driver.say(request, "x" * (30 << 20), [1])
        driver.finish(request)

        statuses = []
        while not statuses or statuses[-1] != 200:
            answer = http.post(
                TEXT, content=b" " * (4 << 20) + b'{"prompt": "x"}', headers={"Content-Type": "application/json"}
            )
            statuses.append(answer.status_code)
        assert len(rest_of(connection)) < 30 << 20
        assert set(statuses) <= {200, 503}


def test_who_reads_gets_a_long_answer(http: httpx.Client, driver: FakeDriver) -> None:
    """To its end."""
    connection = connect(http, post(b'{"prompt": "hold", "logprobs": 1}'))
    request = driver.take()
    for _ in range(20):
        logprobs = [{1: Logprob(-1.0, 1, "x")}] * 1000
        sample = ReturnSample(request_id=request.request_id, text="x" * 1000, token_ids=[1] * 1000, logprobs=logprobs)
        request.channel.put(sample)
    driver.finish(request)
    head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])

    while len(body) < length:
        data = connection.recv(1 << 16)
        assert data
        body += data

    assert head.startswith(b"HTTP/1.1 200 ")
    connection.close()


# Memory.


def test_no_peer_holds_all_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds more than its part of what is half taken is refused; what has ended is held no more."""
    monkeypatch.setattr(memory, "MAX_BYTES", 1000)
    held = Memory()
    with held.hold("hog") as first, held.hold("hog") as second, held.hold("late") as late:
        first.add(1000)
        with pytest.raises(Full, match="try again later"):
            second.add(1)
        late.add(100)
        with pytest.raises(Full):
            late.add(100)
    with held.hold("hog") as again:
        again.add(1000)


def test_a_body_or_an_answer_beyond_the_bound_is_refused(
    http: httpx.Client, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, and when to come again; the work for the answer is aborted, and the next request is served."""
    monkeypatch.setattr(memory, "MAX_BYTES", 100_000)

    body = http.post(CHAT, json=chat("x" * 200_000))
    assert (body.status_code, body.json()["error"]["code"]) == (503, "overloaded")
    assert "Retry-After" in body.headers
    assert not driver.submitted
    answer = http.post(CHAT, json=chat("y " * 45_000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert http.post(CHAT, json=chat("z")).status_code == 200


def test_a_body_counts_once_for_each_prompt(
    http: httpx.Client, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each is sent with all of the parameters; what has been sent is aborted."""
    monkeypatch.setattr(memory, "MAX_BYTES", 1_000_000)
    body = {"prompt": ["hold"] * 1000, "bad_words": ["x" * 5000]}

    answer = http.post(TEXT, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert http.post(TEXT, json={**body, "prompt": ["x"] * 10}).status_code == 200
    while driver.open:
        pass


# Form.


def test_another_protocol_is_not_taken_up(http: httpx.Client) -> None:
    """Java's client offers HTTP/2 with its first request: it is answered in HTTP/1.1, body and all, and so is the next."""
    request = post(b'{"prompt": "x"}')
    with connect(http, HEAD + OFFER + request[len(HEAD) :]) as connection:
        for _ in range(2):
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(request)


def test_an_offer_of_another_protocol_is_found_wherever_it_is(http: httpx.Client) -> None:
    """Behind another request in the same data, with a body of either form, cut anywhere; what follows is read, too."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    offer, body = OFFER.replace(b"Upgrade: ", b"uPGRADE:"), b'{"prompt": "\\nupgrade: h2c"}'
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    offers = get + offer + b"\r\n" + HEAD + offer + chunked + HEAD + offer + post(body)[len(HEAD) :]
    requests = get + b"\r\n" + offers + offers + get + b"Connection: close\r\n\r\n"
    for cut in (len(requests), *range(len(get) + 2, len(get) + len(offers) + 2, 17)):
        with connect(http, requests[:cut]) as connection:
            connection.sendall(requests[cut:])
            assert rest_of(connection).count(b"HTTP/1.1 200 ") == 8


def test_few_requests_wait_for_their_turn_on_a_connection(http: httpx.Client) -> None:
    """Some may be sent before the first is answered; one that floods its own connection with them loses it."""
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    last = get + b"Connection: close\r\n\r\n"

    assert rest_of(connect(http, MAX_AHEAD * (get + b"\r\n") + last)).count(b"HTTP/1.1 200 ") == MAX_AHEAD + 1
    assert rest_of(connect(http, 1000 * (get + b"\r\n") + last)).count(b"HTTP/1.1 200 ") <= MAX_AHEAD + 1


def test_who_hangs_up_on_several_requests_is_not_answered(
    http: httpx.Client, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that is being answered ends, and is no failure of ours."""
    stream = post(b'{"prompt": "hold", "stream": true}')
    with connect(http, 3 * stream) as asked:
        request = driver.take()
        driver.say(request, "word", [4])
        asked.recv(10_000)
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset

    while driver.aborted.empty():
        driver.say(request, "word", [4])
    assert driver.aborted.get() == request.request_id
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_follows_connect_is_a_request(http: httpx.Client) -> None:
    """As it is refused, there is no tunnel."""
    requests = b"CONNECT /x HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.0\r\n\r\n"

    assert rest_of(connect(http, requests)).count(b"HTTP/1.1 200 ") == 1


def test_a_long_head_is_refused_however_it_comes(http: httpx.Client) -> None:
    """Also whole, with the first data, and behind another request."""
    long_head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: %b\r\n\r\n" % (b"y" * 70_000)
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        said = rest_of(connect(http, before + long_head))
        assert said.count(b"HTTP/1.1 200 ") <= bool(before)
        assert said.count(b"HTTP/1.1 400 ") == 1 and b"headers may have 65536 bytes" in said


def test_an_answer_that_has_begun_takes_no_other_into_it(http: httpx.Client, driver: FakeDriver) -> None:
    """What is no request behind it ends the connection, and its own request."""
    with connect(http, post(b'{"prompt": "hold", "stream": true}')) as asked:
        request = driver.take()
        driver.say(request, "word", [4])
        said = asked.recv(10_000)
        while b"word" not in said:
            said += asked.recv(10_000)

        asked.sendall(b"NONSENSE\r\n\r\n")

        assert rest_of(asked) == b""
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
    ],
)
def test_a_request_names_its_host_once(http: httpx.Client, head: bytes) -> None:
    """Two names, or none, are refused in every version of HTTP."""
    with connect(http, head) as connection:
        said = connection.recv(1000)
    assert said.startswith(b"HTTP/1.1 400 ") and b"Host header" in said


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("identity, br", 415), ("Identity", 200)])
def test_a_body_is_taken_as_it_is(http: httpx.Client, coding: str, status: int) -> None:
    """One that is compressed is refused by name."""
    headers = {"Content-Encoding": coding}
    assert http.post(TEXT, json={"prompt": "x"}, headers=headers).status_code == status


def test_a_byte_order_mark_is_none_of_a_body(http: httpx.Client) -> None:
    """Editors on Windows write it."""
    json = {"Content-Type": "application/json"}
    assert http.post(TEXT, content=b'\xef\xbb\xbf{"prompt": "x"}', headers=json).status_code == 200


# Users.


def test_users_are_told_apart_by_a_header_of_trusted_proxies_alone(address: str, driver: FakeDriver) -> None:
    """Anybody else is their own address, whatever they write."""
    told = {"X-Forwarded-For": "203.0.113.7, 198.51.100.9"}
    for proxies in ((), ("127.0.0.0/8",)):
        with gateway(address, proxies=proxies) as http:
            assert http.post(TEXT, json={"prompt": "x", "user": "me"}, headers=told).status_code == 200

    assert [request.user for request in driver.submitted] == ["127.0.0.1", "198.51.100.9"]
    assert driver.submitted[0].client != ""


def test_a_connection_that_is_reset_leaves_nothing(address: str, driver: FakeDriver) -> None:
    """In whatever state: all places are free again."""
    limit = ConnectionLimit(8)
    with gateway(address, limit=limit) as http:
        for beginning in (b"", b"GET", HEAD + b"Content-Length: 10\r\n\r\n{", post(b'{"prompt": "hold"}')):
            connection = connect(http, beginning)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if beginning.endswith(b"}"):
                driver.take()
            connection.close()
        driver.aborted.get(timeout=PATIENCE)
        while len(limit) > 1:  # that of the client itself
            assert http.get("/health").status_code == 200
