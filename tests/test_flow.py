"""Flow control: what a client that reads slowly, or not at all, costs itself and nobody else."""

import itertools
import math
import random
import tracemalloc
from collections import Counter, deque
from pathlib import Path

import pytest
from fake_driver import PATIENCE, WELCOME, FakeDriver, serving
from raw_client import RawClient

from driver.request import ActiveRequest, Logprob, ReturnSample, Usage
from ipc.client import Client
from ipc.connection import read_ahead
from ipc.server import outbox
from ipc.server.outbox import Outbox, Reply
from ipc.server.work import connected_client
from ipc.server.work.client_table import Clients
from ipc.server.work.delivery import SENT_AT_ONCE
from ipc.server.work.stream import Backlog, SampleStream
from ipc.sockets.peer_events import Sent
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.messages import (
    CREDITS,
    PING_INTERVAL,
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
    Token,
)
from ipc.wire.messages import (
    Usage as WireUsage,
)


class Wire:
    """Clients over a connection that holds so many messages until the test reads them."""

    def __init__(self, room: int = 10_000) -> None:
        self.driver = FakeDriver()
        self.outbox = Outbox(Bell())
        self.room = room
        self.gone = False
        self.num_tries = 0
        """Messages that it was to be sent, whether or not there was room."""
        self.clients = Clients(self.driver, WELCOME, self.outbox, self._send)
        self.said: deque[ServerMessage] = deque()
        self.hear(Hello(PROTOCOL_VERSION))
        self.read()

    def hear(self, message: object, now: float = 0.0) -> None:
        self.clients.hear(b"c", [encode(message)], now)

    def open(self, request_id: str = "a") -> ActiveRequest:
        self.hear(Generate(request_id, prompt=[1]))
        return self.driver.take()

    def say(self, request: ActiveRequest, count: int = 1, now: float = 0.0) -> None:
        """Words of this one, that become a message each where they may."""
        for number in range(count):
            self.driver.say(request, f"{number} ", [number])
            self.deliver(now)

    def deliver(self, now: float = 0.0) -> None:
        for reply, sample in self.outbox.take():
            self.clients.deliver(reply, sample, now)

    def make_room(self, now: float = 0.0) -> None:
        """There is room again, for as much as was read."""
        self.clients.has_room(b"c")
        while not self.clients.patience:
            self.clients.look(now)

    def read(self) -> list[ServerMessage]:
        messages = list(self.said)
        self.said.clear()
        return messages

    def _send(self, identity: bytes, message: ServerMessage) -> Sent:
        assert identity == b"c"
        self.num_tries += 1
        if self.gone:
            return Sent.GONE
        if len(self.said) >= self.room:
            return Sent.FULL
        self.said.append(message)
        return Sent.AWAY


def full_wire() -> Wire:
    """One whose connection has no room since the greeting."""
    wire = Wire()
    wire.room = 0
    return wire


def text_of(messages: list[ServerMessage]) -> str:
    """What tokens say, which are all there is."""
    assert all(isinstance(message, Token) for message in messages)
    return "".join(message.text for message in messages)


def token_ids_of(messages: list[ServerMessage]) -> list[int]:
    """The tokens of a completion."""
    return [token_id for message in messages for token_id in message.token_ids]


def test_a_stream_has_so_many_messages_on_the_way_and_the_rest_becomes_one() -> None:
    """Without credit text is joined; with some of it, what has gathered leaves as one message."""
    wire = Wire()
    wire.say(wire.open(), CREDITS + 10)

    first = wire.read()
    wire.hear(Credit("a", 3))
    second = wire.read()

    assert len(first) == CREDITS
    assert [message.token_ids for message in second] == [list(range(CREDITS, CREDITS + 10))]
    assert text_of(first + second) == "".join(f"{number} " for number in range(CREDITS + 10))


def test_versions_of_the_weights_that_begin_in_joined_pieces_are_all_told() -> None:
    """In order, as a client that resumes needs them; the end has them all anyhow, and once."""
    wire = Wire()
    request = wire.open()
    wire.say(request, CREDITS)
    for version in (2, 3):
        wire.driver.say(request, "x", [version], weight_versions=[(version, CREDITS + version - 2)])
    wire.deliver()
    wire.hear(Credit("a", 1))
    *_, joined = wire.read()
    wire.driver.say(request, "x", [4], weight_versions=[(4, CREDITS + 2)])
    wire.driver.weight_versions = [(1, 0), (2, CREDITS), (3, CREDITS + 1), (4, CREDITS + 2)]
    wire.driver.finish(request, "stop", CREDITS + 3)
    wire.deliver()
    [end] = wire.read()

    assert isinstance(joined, Token) and joined.weight_versions == [(2, CREDITS), (3, CREDITS + 1)]
    assert isinstance(end, Done) and end.token_ids == [4] and end.weight_versions == wire.driver.weight_versions


def test_credit_is_never_more_than_at_the_beginning() -> None:
    """A client may not buy itself a longer queue."""
    wire = Wire()
    request = wire.open()
    wire.hear(Credit("a", CREDITS))
    wire.hear(Credit("unknown", 1))
    wire.say(request, 2 * CREDITS)

    assert len(wire.read()) == CREDITS


def test_the_end_needs_no_credit_and_takes_what_waits_with_it() -> None:
    """A client that only waits for the end gets it."""
    wire = Wire()
    request = wire.open()
    wire.say(request, CREDITS + 2)
    wire.driver.finish(request, "stop", CREDITS + 2)
    wire.deliver()

    messages = wire.read()
    assert len(messages) == CREDITS + 1
    assert messages[-1] == Done("a", "32 33 ", [32, 33], "stop", WireUsage(1, CREDITS + 2))
    wire.hear(Abort("a"))
    assert wire.driver.aborted.empty()


def test_the_samples_of_one_request_all_end() -> None:
    """Without credit too, each by a message of its own, and the request's last is the last."""
    wire = Wire()
    request = wire.open()
    wire.say(request, CREDITS)
    wire.read()
    for index in range(40):
        usage = Usage(1, 40) if index == 39 else None
        request.channel.put(ReturnSample(request_id="a", index=index, finish_reason="stop", usage=usage))
        wire.deliver()

    messages = wire.read()
    assert [message.index for message in messages] == list(range(40))
    assert [type(message) for message in messages] == [Token] * 39 + [Done]


def test_a_client_that_reads_nothing_of_what_waits_is_cut_off() -> None:
    """Each of its streams, with an error, after SILENCE_LIMIT; the client itself is not lost."""
    wire = Wire()
    for name in ("a", "b"):
        wire.say(wire.open(name), CREDITS + 1)
    wire.read()

    for now in range(5, int(SILENCE_LIMIT) + 10, 5):
        wire.hear(Pong(), now)
        wire.clients.look(now)

    assert [(message.request_id, message.code) for message in wire.read()] == [
        ("a", "slow_reader"),
        ("b", "slow_reader"),
    ]
    assert {wire.driver.aborted.get_nowait()[-1] for _ in "ab"} == {"a", "b"}
    assert len(wire.clients) == 1


@pytest.mark.parametrize("left", ["read", "waited for", "ended"])
def test_a_stream_waits_while_its_client_reads_others(left: str) -> None:
    """Whether there is something to read of them or nothing yet, and SILENCE_LIMIT counts from the end of the last."""
    wire = Wire()
    unread, other = wire.open("unread"), wire.open("other")
    wire.say(unread, CREDITS + 1)
    if left == "read":
        wire.say(other, CREDITS)
    wire.read()

    for now in range(5, 3 * int(SILENCE_LIMIT), 5):
        if left == "read":
            wire.hear(Credit("other", 1), now)
            wire.say(other, 2, now)
        wire.hear(Pong(), now)
        wire.clients.look(now)
    if left == "ended":
        wire.driver.finish(other)
        wire.deliver(now)
        wire.clients.look(now + PING_INTERVAL)

    assert wire.driver.aborted.empty()


def test_credit_for_a_stream_that_has_ended_tells_that_its_client_reads() -> None:
    """Who is busy with what has come whole may leave the others for later."""
    wire = Wire()
    wire.say(wire.open("unread"), CREDITS + 1)
    for now in range(5, 3 * int(SILENCE_LIMIT), 5):
        wire.hear(Credit("ended", 16), now)
        wire.clients.look(now)

    assert wire.driver.aborted.empty()


def test_no_more_than_a_bound_waits_for_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of which most waits is cut off at once, and others of its client are served on."""
    monkeypatch.setattr(connected_client, "MAX_BACKLOG_BYTES", 10_000)
    wire = Wire()
    unread, other = wire.open("unread"), wire.open("other")
    wire.say(other, CREDITS + 1)
    wire.say(unread, CREDITS)
    wire.read()

    while wire.driver.aborted.empty():
        wire.driver.say(unread, "x" * 1000, [1])
        wire.deliver()
    wire.driver.finish(other)
    wire.deliver()

    cut_off, done = wire.read()
    assert isinstance(cut_off, Error)
    assert (cut_off.request_id, cut_off.code) == ("unread", "slow_reader")
    assert isinstance(done, Done)
    assert wire.driver.aborted.get_nowait().endswith(":unread")


def test_a_long_end_takes_credit_and_comes_in_parts() -> None:
    """What a reader who does not read is sent at the end is bounded too; who reads gets each token once, in order."""
    wire = Wire()
    request = wire.open()
    logprobs = [dict.fromkeys(range(20), Logprob(-1.0, 1))]
    wire.say(request, CREDITS)
    wire.read()
    for number in range(1000):
        sample = ReturnSample(request_id="a", text="x", token_ids=[number], logprobs=logprobs)
        request.channel.put(sample)
    wire.driver.finish(request)
    wire.deliver()
    assert wire.read() == []

    messages: list[ServerMessage] = []
    while not messages or not isinstance(messages[-1], Done):
        wire.hear(Credit("a", 1))
        messages += wire.read()

    assert len(messages) > 10
    assert token_ids_of(messages) == list(range(1000))
    assert sum(len(message.logprobs) for message in messages) == 1000
    assert all(len(message.text) == len(message.token_ids) for message in messages), "who loses the rest has both"
    assert "".join(message.text for message in messages) == "x" * 1000


def test_a_long_answer_that_is_to_come_at_once_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the daemon holds a bounded part of it; no token is lost."""
    monkeypatch.setattr(outbox, "MAX_HELD_BYTES", 1000)
    wire = Wire()
    wire.hear(Generate("a", prompt=[1], stream=False))
    request = wire.driver.take()
    wire.say(request, 100)
    wire.driver.finish(request)
    wire.deliver()

    *tokens, done = wire.read()
    assert 1 < len(tokens) < 10
    assert token_ids_of([*tokens, done]) == list(range(100))


def test_a_stream_that_is_read_a_little_is_not_cut_off() -> None:
    """Slow is not stopped."""
    wire = Wire()
    request = wire.open()
    wire.say(request, CREDITS)
    for now in range(0, 3 * int(SILENCE_LIMIT), 5):
        wire.say(request, 10, now)
        if now % 20 == 0:
            wire.hear(Credit("a", 1), now)
        wire.hear(Pong(), now)
        wire.clients.look(now)

    assert wire.driver.aborted.empty()


def test_a_full_connection_loses_nothing_and_goes_on_when_it_has_room() -> None:
    """What has no room waits, answers too, in order."""
    wire = Wire(room=4)
    first, second = wire.open("1"), wire.open("2")
    wire.say(first, 3)
    wire.say(second, 3)
    wire.hear(Generate("1", prompt="in use"))
    wire.hear(Ping())

    messages = wire.read()
    wire.make_room(now=1.0)
    messages += wire.read()

    assert text_of([message for message in messages if message.request_id == "1" and isinstance(message, Token)]) == (
        "0 1 2 "
    )
    assert text_of([message for message in messages if message.request_id == "2"]) == "0 1 2 "
    assert [message.code for message in messages if isinstance(message, Error)] == ["duplicate_request"]


def test_nothing_is_tried_while_a_connection_is_known_to_be_full() -> None:
    """A sample only waits then, for to try is to join all that waits; room sends it in one message, the end too."""
    wire = Wire(room=4)
    requests = [wire.open("1"), wire.open("2")]
    for request in requests:
        wire.say(request, 5)
    num_tries = wire.num_tries
    for request in requests:
        wire.say(request, 100)
    wire.driver.finish(requests[1])
    wire.deliver()

    assert wire.num_tries == num_tries
    messages = wire.read()
    wire.make_room(now=1.0)
    messages += wire.read()
    assert len(messages) == 6
    assert isinstance(messages[-1], Done)
    for request_id in ("1", "2"):
        token_ids = token_ids_of([message for message in messages if message.request_id == request_id])
        assert token_ids == [*range(5), *range(100)]


def test_credit_on_a_full_connection_has_nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of however many streams something waits, and whatever is said of them: until there is room."""
    wire = full_wire()
    requests = [wire.open(str(number)) for number in range(100)]
    for request in requests:
        wire.say(request, 3)
    joins: list[object] = []
    monkeypatch.setattr(
        "ipc.server.work.stream.joined", lambda samples: joins.append(samples) or outbox.joined(samples)
    )

    for number in range(100):
        wire.hear(Credit(str(number), 1))
        wire.hear(Ping())
    wire.clients.look(PING_INTERVAL)

    assert not joins and wire.num_tries <= 210


def test_streams_take_turns_where_their_client_reads_slowly() -> None:
    """There are more of them than messages that its connection has room for at once."""
    wire = full_wire()
    requests = [wire.open(str(number)) for number in range(40)]
    turns: Counter[str] = Counter()
    for _ in range(20):
        for request in requests:
            wire.say(request)
        wire.room = 10
        wire.make_room()
        for message in wire.read():
            assert isinstance(message, Token)
            turns[message.request_id] += 1
            wire.hear(Credit(message.request_id, 1))

    assert turns == {str(number): 5 for number in range(40)}


def test_one_turn_sends_a_bounded_part_and_the_next_goes_on() -> None:
    """Of one client after the other; nothing new overtakes what has waited, and answers come in order."""
    wire = full_wire()
    requests = [wire.open(str(number)) for number in range(3 * SENT_AT_ONCE)]
    for request in requests:
        wire.say(request)
    wire.room = 10_000

    wire.clients.has_room(b"c")
    wire.clients.look(now=0.0)
    first = wire.read()
    wire.hear(Generate("0", prompt="in use"))
    wire.hear(Credit("0", 1))
    wire.say(requests[-1])
    between = wire.read()
    while not wire.clients.patience:
        wire.clients.look(now=0.0)
    error, *rest = wire.read()

    assert len(first) == SENT_AT_ONCE and between == [] and isinstance(error, Error)
    assert [message.request_id for message in [*first, *rest]] == [str(number) for number in range(3 * SENT_AT_ONCE)]
    assert token_ids_of(rest[-1:]) == [0, 0]


def test_clients_with_room_take_turns() -> None:
    """One with much that waits holds up no other for longer than a turn."""
    driver, sent, room = FakeDriver(), list[bytes](), {b"many": 0, b"few": 0}

    def send(identity: bytes, message: ServerMessage) -> Sent:
        del message
        if not room[identity]:
            return Sent.FULL
        sent.append(identity)
        return Sent.AWAY

    clients = Clients(driver, WELCOME, box := Outbox(Bell()), send)
    for identity, num_streams in ((b"many", 5 * SENT_AT_ONCE), (b"few", 1)):
        clients.hear(identity, [encode(Hello(PROTOCOL_VERSION))], now=0.0)
        for number in range(num_streams):
            clients.hear(identity, [encode(Generate(str(number), prompt=[1]))], now=0.0)
            driver.say(driver.take(), "x", [1])
    for reply, sample in box.take():
        clients.deliver(reply, sample, now=0.0)
    for identity in room:
        room[identity] = 1
        clients.has_room(identity)

    clients.look(now=0.0)
    clients.look(now=0.0)

    assert b"few" in sent and len(sent) == 2 * SENT_AT_ONCE


def test_a_turn_counts_messages_and_not_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has as many messages as it has credit, which are sent together."""
    monkeypatch.setattr(outbox, "MAX_PART_BYTES", 50)
    wire = full_wire()
    for number in range(SENT_AT_ONCE):
        request = wire.open(str(number))
        wire.say(request, 8)
    wire.room = 10_000
    wire.clients.has_room(b"c")

    wire.clients.look(now=0.0)

    assert SENT_AT_ONCE <= len(wire.read()) < SENT_AT_ONCE + CREDITS


@pytest.mark.parametrize("how", ["gone", "aborted", "anew"])
def test_a_stream_that_ends_while_it_waits_for_room_has_no_turn(how: str) -> None:
    """Nor has one of a client that is gone, or has said hello again with the same ids."""
    wire = full_wire()
    requests = [wire.open(str(number)) for number in range(3)]
    for request in requests:
        wire.say(request)
    wire.room = 10
    if how == "gone":
        wire.gone = True
        wire.make_room()
        assert len(wire.clients) == 0 and wire.clients.patience == math.inf
    elif how == "aborted":
        wire.driver.finish(requests[1], "abort")
        wire.deliver()
        wire.make_room()
        assert [type(message) for message in wire.read()] == [Token, Done, Token]
    else:
        wire.clients.has_room(b"c")
        wire.hear(Hello(PROTOCOL_VERSION))
        wire.open("1")
        wire.make_room()
        assert [type(message) for message in wire.read()] == [type(WELCOME)]


def test_what_waits_is_sent_in_any_order_of_events() -> None:
    """Each token once and in its stream's order, in a random history of words, credit and room."""
    for seed in range(20):
        draw, wire = random.Random(seed), full_wire()
        requests = {str(number): wire.open(str(number)) for number in range(50)}
        read: dict[str, list[ServerMessage]] = {name: [] for name in requests}
        said, ended = Counter[str](), set[str]()
        for step in range(3000):
            name = draw.choice(list(requests))
            match draw.randrange(4):
                case 0 | 1 if name not in ended:
                    wire.driver.say(requests[name], "x", [said[name]])
                    said[name] += 1
                    wire.deliver()
                case 2 if step > 2000 and name not in ended:
                    wire.driver.finish(requests[name])
                    wire.deliver()
                    ended.add(name)
                case 3:
                    wire.room = draw.randrange(20)
                    wire.clients.has_room(b"c")
                    wire.clients.look(now=0.0)
                    for message in wire.read():
                        read[message.request_id].append(message)
                        wire.hear(Credit(message.request_id, 1))
        wire.room = 10_000
        while any(len(token_ids_of(messages)) < said[name] for name, messages in read.items()):
            wire.make_room()
            messages = wire.read()
            assert messages, "something waits, and nothing sends it"
            for message in messages:
                read[message.request_id].append(message)
                wire.hear(Credit(message.request_id, 1))

        for name, messages in read.items():
            assert token_ids_of(messages) == list(range(said[name]))
            assert isinstance(messages[-1], Done) == (name in ended)


@pytest.mark.parametrize("room", [4, 10_000])
def test_what_waits_for_a_full_connection_is_bounded(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """As what waits for credit is: the longest is cut off, though nothing of it was tried."""
    monkeypatch.setattr(connected_client, "MAX_BACKLOG_BYTES", 10_000)
    wire = Wire(room)
    request = wire.open()
    for _ in range(CREDITS + 10):
        wire.driver.say(request, "x" * 1000, [1])
        wire.deliver()

    assert wire.driver.aborted.get_nowait().endswith(":a")


def test_what_waits_takes_about_the_bytes_that_are_counted() -> None:
    """So that the bound on them is one: a token by itself takes nine times as many. Nothing of it is lost."""
    stream = SampleStream(Reply(Outbox(Bell()), b"c", "a"), Backlog())
    num_tokens = 10_000
    tracemalloc.start()
    for number in range(num_tokens):
        stream.put(ReturnSample(request_id="a", text=f"{number} ", token_ids=[number]), now=0.0)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_bytes < 2 * stream.num_bytes
    messages: list[ServerMessage] = []

    def send(message: ServerMessage) -> Sent:
        messages.append(message)
        return Sent.AWAY

    stream.flush(send, now=0.0)
    assert token_ids_of(messages) == list(range(num_tokens))
    assert text_of(messages) == "".join(f"{number} " for number in range(num_tokens))
    assert stream.num_bytes == 0


def test_a_client_with_a_full_connection_that_reads_nothing_is_cut_off() -> None:
    """After SILENCE_LIMIT since the first that waits, however much comes later."""
    wire = Wire(room=4)
    request = wire.open()
    for now in range(5, int(SILENCE_LIMIT) + 15, 5):
        wire.say(request, 5, now)
        wire.hear(Pong(), now)
        wire.clients.look(now)

    assert wire.driver.aborted.get_nowait().endswith(":a")


def test_a_client_that_asks_and_never_reads_is_cut_off() -> None:
    """Answers are not held for ever either."""
    wire = Wire(room=1)
    wire.open()
    while wire.driver.aborted.empty():
        wire.hear(Generate("a", prompt="in use"))

    assert len(wire.clients) == 0


def test_a_silent_client_is_pinged_and_any_answer_will_do() -> None:
    """One that only answers pings is not taken for lost."""
    wire = Wire()
    for now in range(0, 3 * int(SILENCE_LIMIT), 5):
        wire.clients.look(float(now))
        if wire.read() == [Ping()]:
            wire.hear(Pong(), now)

    assert len(wire.clients) == 1


def test_a_client_that_does_not_read_its_socket_harms_nobody(tmp_path: object) -> None:
    """Over a real socket: another is served meanwhile, and what the first has not read waits for it."""
    address = f"ipc://{tmp_path}/o.sock"
    driver = FakeDriver()
    with (
        serving(address, driver),
        RawClient(address, receive_high_water=1) as slow,
        RawClient(address) as good,
    ):
        slow.greet()
        good.greet()
        slow.say(Generate("a", prompt=[1]))
        request = driver.take()
        for number in range(CREDITS + 10):
            driver.say(request, "x" * 100_000, [number])
            good.say(Generate("good", prompt="x"))
            while not isinstance(good.hear(), Done):
                pass
        driver.finish(request)

        token_ids = []
        while not isinstance(message := slow.hear(), Done):
            token_ids += message.token_ids
        assert token_ids + message.token_ids == list(range(CREDITS + 10))


@pytest.mark.parametrize("stream", [True, False])
def test_the_client_reads_streams_of_any_length(tmp_path: object, stream: bool) -> None:
    """Client and daemon agree on credit: nothing stops after CREDITS messages."""
    address, driver = f"ipc://{tmp_path}/o.sock", FakeDriver()
    words = [f"{number}" for number in range(10 * CREDITS)]
    with serving(address, driver), Client(address, timeout=PATIENCE) as client:
        if stream:
            assert "".join(piece.text for piece in client.generate(" ".join(words))) == "".join(words)
        else:
            assert client.complete(" ".join(words)).text == "".join(words)


def test_a_client_that_is_gone_is_found_out_by_a_ping() -> None:
    """Though nothing is being sent to it: what it waits for is aborted after two looks."""
    wire = Wire()
    wire.open()

    wire.gone = True
    for now in (0.0, PING_INTERVAL, 2 * PING_INTERVAL):
        wire.clients.look(now)

    assert wire.driver.aborted.get_nowait().endswith(":a")
    assert len(wire.clients) == 0


def test_a_hundred_streams_are_read_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though together they are a multiple of what the client reads ahead: each to its end, and none is cut off."""
    monkeypatch.setattr(read_ahead, "MAX_READ_AHEAD_BYTES", 20_000)
    address, driver = f"ipc://{tmp_path}/o.sock", FakeDriver()
    with serving(address, driver), Client(address, timeout=PATIENCE) as client:
        streams = [client.generate([number]) for number in range(100)]
        requests = [driver.take() for _ in streams]
        for number in range(4 * CREDITS):
            for request in requests:
                driver.say(request, f"{number} ", [number])
        for request in requests[50:]:
            driver.finish(request)

        for number, stream in enumerate(streams):
            token_ids = [token_id for piece in itertools.islice(stream, 1) for token_id in piece.token_ids]
            if number < 50:
                driver.finish(requests[number])
            token_ids += [token_id for piece in stream for token_id in piece.token_ids]
            assert token_ids == list(range(4 * CREDITS))
    assert driver.aborted.empty()


def test_what_a_reader_does_not_take_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound no credit is given, and what follows waits at the daemon; a stream that is dropped counts no more."""
    monkeypatch.setattr(read_ahead, "MAX_READ_AHEAD_BYTES", 10_000)
    address, driver = f"ipc://{tmp_path}/o.sock", FakeDriver()
    with serving(address, driver), Client(address, timeout=PATIENCE) as client:
        ahead = client._connection._calls.read_ahead
        stopped = client.generate([1])
        request = driver.take()
        for number in range(40 * CREDITS):
            driver.say(request, "x" * 1000, [number])
            client.complete("in between")  # what was said has come, as far as it may

        assert 10_000 <= ahead.num_bytes <= 10_000 + 1100 * (CREDITS + CREDITS // 2)
        first = [next(stopped).token_ids[0] for _ in range(CREDITS)]
        stopped.close()
        client.tokenize("in between")
        assert first == list(range(CREDITS))
        assert ahead.num_bytes == 0
