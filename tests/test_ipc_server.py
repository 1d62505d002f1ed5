"""The socket thread over real sockets, with a driver that echoes."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
from fake_driver import LIMITS, PATIENCE, WELCOME, FakeDriver, build_server, serving
from free_ports import free_port
from raw_client import RawClient

from driver.errors import DriverStopped, Overloaded
from driver.request import ReturnSample, Usage
from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.errors import AddressError, AddressInUse
from ipc.server.listener import HARD_MAX_MESSAGE_BYTES, Listener
from ipc.server.outbox import Outbox, Reply
from ipc.server.shared_answers import Send
from ipc.server.starting import StartingRules
from ipc.server.work.client_table import Clients
from ipc.server.zmq_server import Server
from ipc.sockets.peer_events import Sent
from ipc.sockets.spawner import Spawner
from ipc.sockets.tenants import EVERYBODY
from ipc.wire.addresses import control_address
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.messages import (
    PROTOCOL_VERSION,
    SILENCE_LIMIT,
    Abort,
    Credit,
    Done,
    Error,
    Generate,
    Hello,
    Ping,
    Pong,
    ServerMessage,
    Starting,
    Token,
    Welcome,
)
from ipc.wire.messages import (
    Usage as WireUsage,
)


@pytest.fixture
def driver() -> FakeDriver:
    """What the server under test serves."""
    return FakeDriver()


@pytest.fixture
def server(address: str, driver: FakeDriver) -> Iterator[Server]:
    """A server that listens, and at the end has not failed."""
    with serving(address, driver) as server:
        yield server


@pytest.fixture
def client(server: Server, address: str) -> Iterator[RawClient]:  # noqa: ARG001
    """A client that has been welcomed."""
    with RawClient(address) as client:
        client.greet()
        yield client


def whole(client: RawClient, request_id: str) -> tuple[str, list[int], ServerMessage]:
    """The text and ids of one request to its last message, and that message."""
    text, token_ids = "", []
    while True:
        message = client.hear()
        assert message.request_id == request_id
        if isinstance(message, Error):
            return text, token_ids, message
        text, token_ids = text + message.text, token_ids + message.token_ids
        if isinstance(message, Done):
            return text, token_ids, message


def assert_served(client: RawClient) -> None:
    """A good client gets what it asks for."""
    client.say(Generate("good", prompt="all is well"))
    assert whole(client, "good")[:2] == ("alliswell", [3, 2, 4])


@pytest.mark.usefixtures("server")
def test_hello_is_answered_with_what_is_served(address: str) -> None:
    """A client learns the version, the model and the limits before it asks."""
    with RawClient(address) as client:
        welcome = client.greet()

        assert welcome == msgspec.structs.replace(WELCOME, client_id=welcome.client_id)


def test_a_prompt_is_answered_by_its_pieces_and_a_last_one(client: RawClient) -> None:
    """The pieces of one request, joined, are its completion; the last has the reason and the usage."""
    client.say(Generate("a", prompt="once upon a time"))

    text, token_ids, last = whole(client, "a")

    assert (text, token_ids) == ("onceuponatime", [4, 4, 1, 4])
    assert isinstance(last, Done)
    assert (last.finish_reason, last.usage) == ("stop", WireUsage(1, 4))


def test_an_answer_that_is_not_streamed_comes_in_one_piece(client: RawClient, driver: FakeDriver) -> None:
    """All that was said of it comes with its end, and nothing before."""
    client.say(Generate("a", prompt=[1], stream=False))
    request = driver.take()
    driver.say(request, "once", [4])
    driver.say(request, "upon", [4])

    before = [client.ask(Ping()), client.ask(Ping())]  # the second pong comes after what there was to send
    driver.finish(request, "stop", 2)

    assert before == [Pong(), Pong()]
    assert client.hear() == Done("a", "onceupon", [4, 4], "stop", WireUsage(1, 2))


def test_messages_reach_the_driver_as_messages(client: RawClient) -> None:
    """A chat is passed on as it came."""
    client.say(Generate("a", messages=[{"role": "user", "content": "three words here"}]))

    assert whole(client, "a")[0] == "threewordshere"


def test_parameters_reach_the_driver_unchecked(client: RawClient) -> None:
    """What a parameter means is the driver's to say."""
    client.say(Generate("a", prompt="x", params={"finish_reason": "length"}))

    last = whole(client, "a")[2]
    assert isinstance(last, Done)
    assert last.finish_reason == "length"


def test_two_clients_may_use_the_same_request_ids(client: RawClient, driver: FakeDriver, address: str) -> None:
    """Each hears of its own request only."""
    with RawClient(address) as other:
        other.greet()
        client.say(Generate("same", prompt=[1]))
        first = driver.take()
        other.say(Generate("same", prompt=[2]))
        second = driver.take()

        driver.say(second, "other", [2])
        driver.finish(second)
        driver.say(first, "client", [1])
        driver.finish(first)

        assert first.request_id != second.request_id
        assert whole(client, "same")[0] == "client"
        assert whole(other, "same")[0] == "other"


def test_an_abort_ends_the_request_it_names(client: RawClient, driver: FakeDriver) -> None:
    """The request gets its last message, with the reason."""
    client.say(Generate("a", prompt=[1]))
    request = driver.take()

    client.say(Abort("a"))

    last = whole(client, "a")[2]
    assert isinstance(last, Done)
    assert last.finish_reason == "abort"
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_an_abort_of_an_unknown_request_is_no_error(client: RawClient, driver: FakeDriver) -> None:
    """A request that just ended may be aborted by a client that has not heard of it."""
    client.say(Abort("gone"))

    assert client.ask(Ping()) == Pong()
    assert driver.aborted.empty()


def test_several_samples_of_one_request_become_one_message() -> None:
    """What has gathered while the socket thread was busy leaves together, in the order of first appearance."""
    outbox = Outbox(Bell())
    first, second = Reply(outbox, b"c", "1"), Reply(outbox, b"c", "2")
    first.put(ReturnSample(request_id="1", text="Once", token_ids=[1]))
    second.put(ReturnSample(request_id="2", text="Two", token_ids=[5]))
    first.put(ReturnSample(request_id="1", text=" upon", token_ids=[2]))
    first.put(ReturnSample(request_id="1", text="", token_ids=[3], finish_reason="stop", usage=Usage(1, 3)))

    assert outbox.take() == [
        (
            first,
            ReturnSample(
                request_id="1", text="Once upon", token_ids=[1, 2, 3], finish_reason="stop", usage=Usage(1, 3)
            ),
        ),
        (second, ReturnSample(request_id="2", text="Two", token_ids=[5])),
    ]
    assert outbox.take() == []


def test_samples_of_several_outputs_become_a_message_each() -> None:
    """Outputs of one request are not mixed, and the one with the request's end leaves last."""
    outbox = Outbox(Bell())
    streamed, whole = Reply(outbox, b"c", "1"), Reply(outbox, b"c", "2", stream=False)
    for reply in (streamed, whole):
        reply.put(ReturnSample(request_id="x", index=1, text="b", token_ids=[1]))
        reply.put(ReturnSample(request_id="x", index=0, text="a", token_ids=[2], finish_reason="stop"))
        reply.put(ReturnSample(request_id="x", index=1, token_ids=[3], finish_reason="length", usage=Usage(1, 3)))

    joined = [
        ReturnSample(request_id="x", index=0, text="a", token_ids=[2], finish_reason="stop"),
        ReturnSample(request_id="x", index=1, text="b", token_ids=[1, 3], finish_reason="length", usage=Usage(1, 3)),
    ]
    assert outbox.take() == [(reply, sample) for reply in (streamed, whole) for sample in joined]


def test_text_that_waits_beside_an_error_is_still_sent(client: RawClient, driver: FakeDriver) -> None:
    """A request that fails midway loses nothing of what it had said."""
    client.say(Generate("a", prompt=[1]))
    driver.say(driver.take(), "half a", [1, 2])
    driver.stop("the end")

    assert whole(client, "a") == ("half a", [1, 2], Error("a", "stopped", "the end"))


# What clients do wrong: each hears of it, and nobody else does.


def test_an_unsupported_version_is_refused(client: RawClient, address: str) -> None:
    """The answer says which version the daemon speaks, and the client stays a stranger."""
    with RawClient(address) as old:
        answer = old.ask(Hello(PROTOCOL_VERSION + 1))

        assert isinstance(answer, Error)
        assert (answer.request_id, answer.code) == (None, "unsupported_version")
        assert f"version {PROTOCOL_VERSION}" in answer.message
        refused = old.ask(Generate("a", prompt="x"))
        assert isinstance(refused, Error)
        assert refused.code == "invalid_request"
    assert_served(client)


@pytest.mark.parametrize("message", [Generate("a", prompt="x"), Abort("a"), Credit("a", 1), Ping()])
def test_without_hello_nothing_is_done(
    client: RawClient, driver: FakeDriver, address: str, message: Generate | Abort | Credit | Ping
) -> None:
    """A stranger is told to say hello first."""
    with RawClient(address) as stranger:
        answer = stranger.ask(message)

        assert isinstance(answer, Error)
        assert answer.request_id == getattr(message, "request_id", None)
        assert (answer.code, answer.message.split(":")[0]) == ("invalid_request", "say hello first")
        assert driver.aborted.empty()
        assert not driver.open
    assert_served(client)


def test_a_message_nested_too_deeply_to_be_followed_is_an_error_of_its_request(client: RawClient) -> None:
    """And not of the connection, which would end all else that is open in it."""
    client.greet()
    nested = b"\x83\xa4type\xa8generate\xaarequest_id\xa1a\xa6params\x81\xa1x" + b"\x91" * 100_000 + b"\x01"

    client.send(nested)

    error = client.hear()
    assert isinstance(error, Error)
    assert (error.request_id, error.code) == ("a", "invalid_request")
    assert "nested too deeply" in error.message


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [b"", encode(Ping())], [encode(Ping())] * 3, [b"GET / HTTP/1.1"]])
def test_a_malformed_message_is_an_error_to_its_sender(client: RawClient, address: str, frames: list[bytes]) -> None:
    """Rubbish and extra frames are answered; the sender may go on, and so does everybody else."""
    with RawClient(address) as clumsy:
        clumsy.greet()
        clumsy.send(*frames)

        answer = clumsy.hear()

        assert isinstance(answer, Error)
        assert (answer.request_id, answer.code) == (None, "invalid_request")
        assert_served(clumsy)
    assert_served(client)


def test_a_malformed_request_is_named_in_its_error(client: RawClient) -> None:
    """A client with many requests open can tell which one was wrong."""
    client.send(msgspec.msgpack.encode({"type": "generate", "request_id": "a", "prompt": 7}))

    answer = client.hear()

    assert isinstance(answer, Error)
    assert (answer.request_id, answer.code) == ("a", "invalid_request")
    assert "$.prompt" in answer.message


def test_a_message_over_the_limit_is_refused_by_name(client: RawClient, address: str) -> None:
    """The limit is told, the request named, and the connection stays."""
    with RawClient(address) as verbose:
        verbose.greet()

        answer = verbose.ask(Generate("long", prompt="x" * MAX_MESSAGE_BYTES))

        assert isinstance(answer, Error)
        assert (answer.request_id, answer.code) == ("long", "message_too_long")
        assert str(MAX_MESSAGE_BYTES) in answer.message
        assert_served(verbose)
    assert_served(client)


def test_a_message_over_the_hard_limit_ends_its_connection(client: RawClient, address: str) -> None:
    """It is never read, and nobody else notices."""
    with RawClient(address) as flooder:
        flooder.greet()
        flooder.send(b"x" * (HARD_MAX_MESSAGE_BYTES + 1))
        flooder.say(Ping())  # on the new connection that libzmq makes

        answer = flooder.hear()

        assert isinstance(answer, Error)
        assert answer.message.startswith("say hello first")
    assert_served(client)


def test_a_request_id_in_use_is_refused_and_its_first_bearer_goes_on(client: RawClient, driver: FakeDriver) -> None:
    """After its last message the id may be used again."""
    client.say(Generate("a", prompt=[1]))
    first = driver.take()

    refused = client.ask(Generate("a", prompt="again"))

    assert isinstance(refused, Error)
    assert (refused.request_id, refused.code) == ("a", "duplicate_request")
    assert driver.refused == {"duplicate_request": 1}
    driver.say(first, "still here", [1])
    driver.finish(first)
    assert whole(client, "a")[0] == "still here"
    client.say(Generate("a", prompt="again"))
    assert whole(client, "a")[0] == "again"


@pytest.mark.parametrize(
    ("refusal", "code"), [(Overloaded("too many wait"), "overloaded"), (DriverStopped("over"), "stopped")]
)
def test_what_the_driver_refuses_at_once_is_an_error(
    client: RawClient, driver: FakeDriver, refusal: Overloaded | DriverStopped, code: str
) -> None:
    """The driver's code and words reach the client, whose id is free again."""
    driver.refusal = refusal
    assert client.ask(Generate("a", prompt="x")) == Error("a", code, str(refusal))

    driver.refusal = None
    client.say(Generate("a", prompt="x"))
    assert whole(client, "a")[0] == "x"


# Clients that come and go.


def test_the_work_of_a_client_that_vanished_is_aborted(client: RawClient, driver: FakeDriver, address: str) -> None:
    """All of it, as soon as one of its messages cannot be delivered."""
    vanishing = RawClient(address)
    vanishing.greet()
    vanishing.say(Generate("a", prompt=[1]))
    vanishing.say(Generate("b", prompt=[2]))
    first, second = driver.take(), driver.take()

    vanishing.vanish()
    while driver.aborted.empty():
        driver.say(first, "is anybody there?", [1])
        assert client.ask(Ping()) == Pong()

    aborted = {driver.aborted.get(timeout=PATIENCE) for _ in range(2)}
    assert aborted == {first.request_id, second.request_id}
    assert_served(client)


def test_a_second_hello_begins_anew(client: RawClient, driver: FakeDriver) -> None:
    """What the client had open is aborted and not heard of again."""
    client.say(Generate("a", prompt=[1]))
    request = driver.take()

    client.greet()

    assert driver.aborted.get(timeout=PATIENCE) == request.request_id
    assert_served(client)


def recording(sent: list[tuple[bytes, object]]) -> Send:
    """A way of sending that keeps what is sent."""

    def send(identity: bytes, message: ServerMessage) -> Sent:
        sent.append((identity, message))
        return Sent.AWAY

    return send


def build_clients() -> tuple[Clients, FakeDriver, list[tuple[bytes, object]]]:
    """Two clients, "silent" and "pinging", that each have a request open since 0.0; what they are sent."""
    driver, sent = FakeDriver(), []
    clients = Clients(driver, WELCOME, Outbox(Bell()), recording(sent))
    for identity in (b"silent", b"pinging"):
        clients.hear(identity, [encode(Hello(PROTOCOL_VERSION))], now=0.0)
        clients.hear(identity, [encode(Generate("a", prompt=[1]))], now=0.0)
    return clients, driver, sent


def test_a_silent_client_is_taken_for_lost() -> None:
    """Who has said nothing for SILENCE_LIMIT loses its requests; who pings does not."""
    clients, driver, sent = build_clients()

    for now in range(0, int(SILENCE_LIMIT) + 6, 5):
        clients.hear(b"pinging", [encode(Ping())], now)
        clients.look(now)

    assert len(clients) == 1
    assert driver.aborted.get_nowait() == f"{b'silent'.hex()}:a"
    assert driver.aborted.empty()
    assert sent[-1] == (b"pinging", Pong())


def test_a_server_that_was_frozen_takes_nobody_for_lost() -> None:
    """After a pause of its own it gives everyone as long as ever to say something, and only then drops the silent."""
    clients, driver, _ = build_clients()
    clients.look(now=0.0)

    for now in range(600, 600 + int(SILENCE_LIMIT), 5):
        clients.look(now)
    assert len(clients) == 2

    clients.hear(b"pinging", [encode(Ping())], now=630.0)
    for now in (630.0, 635.0):
        clients.look(now)
    assert len(clients) == 1
    assert driver.aborted.get_nowait() == f"{b'silent'.hex()}:a"


def test_late_samples_do_not_reach_a_new_request_of_the_same_id() -> None:
    """After a second hello the old request's words are dropped, though a new one bears its id."""
    driver, sent = FakeDriver(), []
    outbox = Outbox(Bell())
    clients = Clients(driver, WELCOME, outbox, recording(sent))
    for prompt in ([1], [2]):
        clients.hear(b"c", [encode(Hello(PROTOCOL_VERSION))], now=0.0)
        clients.hear(b"c", [encode(Generate("a", prompt=prompt))], now=0.0)
    old, new = driver.take(), driver.take()
    old.channel.put(ReturnSample(request_id="old", text="late"))
    new.channel.put(ReturnSample(request_id="new", text="current"))

    for reply, sample in outbox.take():
        clients.deliver(reply, sample, now=0.0)

    assert [message.text for _, message in sent if isinstance(message, Token)] == ["current"]


# The server's own life.


def test_an_address_in_use_is_an_error_of_start(address: str, client: RawClient) -> None:
    """The second server says so and the first goes on."""
    second = build_server(address)

    with pytest.raises(AddressInUse, match="in use"):
        second.start()

    assert_served(client)


def test_a_tcp_port_in_use_is_an_error_of_start(driver: FakeDriver) -> None:
    """As with files, and a port is served like one."""
    address = f"tcp://127.0.0.1:{free_port(2)}"
    with serving(address, driver), RawClient(address) as client:
        client.greet()

        with pytest.raises(AddressInUse, match="in use"):
            build_server(address).start()

        assert_served(client)


def test_a_directory_that_cannot_be_had_is_an_error_of_start(tmp_path: Path) -> None:
    """Whatever is wrong with an address comes out of start, in words."""
    with pytest.raises(AddressError, match="No such file"):
        build_server(f"ipc://{tmp_path}/missing/o.sock").start()


def test_a_stopped_server_gives_its_address_back(address: str, driver: FakeDriver) -> None:
    """The next one serves there."""
    for _ in range(2):
        with serving(address, driver), RawClient(address) as client:
            client.greet()
            assert_served(client)


@pytest.mark.usefixtures("server")
def test_nobody_else_may_connect_to_the_socket(tmp_path: Path) -> None:
    """The file is its owner's alone, in whatever directory it lies."""
    assert (tmp_path / "o.sock").stat().st_mode & 0o077 == 0


def test_clients_that_come_early_are_answered_when_the_driver_is_there(address: str, driver: FakeDriver) -> None:
    """Between start and open they wait, and hear how far the start is, as it goes on; other messages are too early."""
    server = build_server(address)
    server.start()
    with RawClient(address) as client, RawClient(control_address(address)) as control, RawClient(address) as gone:
        gone.ask(Hello(PROTOCOL_VERSION))
        gone.vanish()
        assert client.ask(Hello(PROTOCOL_VERSION)) == control.ask(Hello(PROTOCOL_VERSION)) == Starting("starting")
        server.progress = "compiling: 9 of 19 functions"
        assert client.hear() == control.hear() == Starting("compiling: 9 of 19 functions")
        early = client.ask(Generate("a", prompt="x"))
        assert isinstance(early, Error) and early.request_id == "a" and "wait for welcome" in early.message
        refused = client.ask(Hello(PROTOCOL_VERSION + 1))
        assert isinstance(refused, Error) and refused.code == "unsupported_version"
        server.open(driver, model="parrot", limits=LIMITS)

        assert isinstance(client.hear(), Welcome) and isinstance(control.hear(), Welcome)
        assert isinstance(client.ask(Generate("a", prompt="x")), Token | Done)
    server.stop()


def test_all_who_wait_for_a_start_hear_of_its_progress() -> None:
    """Also of what was told first to somebody who has just come."""
    sent: list[tuple[bytes, object]] = []
    progress = "reading"
    rules = StartingRules(recording(sent), lambda: progress)
    hello = [encode(Hello(PROTOCOL_VERSION))]

    rules.hear(b"first", hello, 0.0, EVERYBODY)
    rules.look(1.0)
    progress = "compiling"
    rules.hear(b"second", hello, 1.5, EVERYBODY)
    rules.look(2.0)
    rules.look(3.0)

    heard = {name: [message.text for to, message in sent if to == name] for name in (b"first", b"second")}
    assert heard == {b"first": ["reading", "compiling"], b"second": ["compiling", "compiling"]}


def test_stop_sends_what_the_driver_said_last(address: str, driver: FakeDriver) -> None:
    """Open requests learn why before the connection closes."""
    server = build_server(address)
    server.start()
    server.open(driver, model="parrot", limits=LIMITS)
    with RawClient(address) as client:
        client.greet()
        for number in range(100):
            client.say(Generate(str(number), prompt=[number]))
            driver.take()
        driver.stop("the operator stopped the daemon")

        server.stop()

        errors = [client.hear() for _ in range(100)]
    assert errors == [Error(str(number), "stopped", "the operator stopped the daemon") for number in range(100)]


def test_a_server_that_was_never_opened_stops(address: str) -> None:
    """A daemon that fails to load its model leaves nothing behind."""
    server = build_server(address)
    server.start()

    server.stop()
    server.stop()

    with serving(address, FakeDriver()), RawClient(address) as client:
        client.greet()


def test_what_a_message_raises_ends_its_request(address: str, driver: FakeDriver) -> None:
    """By our fault, as far as its client hears; it may ask again by the same id, and others hear nothing of it."""
    with serving(address, driver), RawClient(address) as client, RawClient(address) as other:
        client.greet()
        other.greet()
        driver.refusal = ZeroDivisionError("a bug")  # type: ignore[assignment]
        error = client.ask(Generate("good", prompt="x"))
        driver.refusal = None
        assert_served(client)
        assert_served(other)

    assert isinstance(error, Error) and (error.request_id, error.code) == ("good", "internal")
    assert "a bug" not in error.message


def test_a_fault_of_ours_is_told_to_the_daemon(address: str, driver: FakeDriver) -> None:
    """A dead socket thread is not a quiet one."""

    class Bug(BaseException):
        """What is nobody's request's doing."""

    failures: SimpleQueue[str] = SimpleQueue()
    server = build_server(address, failures.put)
    server.start()
    server.open(driver, model="parrot", limits=LIMITS)
    driver.refusal = Bug("a bug")  # type: ignore[assignment]
    try:
        with RawClient(address) as client:
            client.greet()
            client.say(Generate("a", prompt="x"))

            assert "a bug" in failures.get(timeout=PATIENCE)
    finally:
        server.stop()


def test_what_has_room_is_sent_before_the_end(tmp_path: Path) -> None:
    """A listener that is told to stop ends when its rules have no more to do at once."""
    begun, stopping = threading.Event(), threading.Event()

    class Behind(Clients):
        looks_left = 5

        @property
        def patience(self) -> float:
            return 0.0 if self.looks_left else math.inf

        def look(self, now: float) -> None:
            del now
            begun.set()
            assert stopping.wait(timeout=PATIENCE)
            self.looks_left -= 1

    spawner, failures = Spawner(), list[str]()
    listener = Listener("work", spawner, f"ipc://{tmp_path}/o.sock", failures.append, None, str)
    listener.start()
    rules = Behind(FakeDriver(), WELCOME, listener.outbox, listener.send)
    listener.open(rules)
    assert begun.wait(timeout=PATIENCE)
    stopper = threading.Thread(target=listener.stop)
    stopper.start()
    while not listener._stopping:
        stopper.join(timeout=0.01)
    stopping.set()
    stopper.join(timeout=PATIENCE)
    spawner.stop()

    assert not stopper.is_alive() and not failures and rules.looks_left == 0
