"""The Client against a server in this process, over real sockets."""

import errno
import gc
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_driver import PATIENCE, WELCOME, FakeDriver, build_server, serving
from fakes import FakeEngine, FakeTokenizer

from driver import request as driver_request
from driver.errors import Overloaded
from driver.odriver import oDriver
from driver.request import Logprob, Usage
from engine.request_limits import MAX_MESSAGE_BYTES
from ipc.client import Client
from ipc.connection import session
from ipc.control_client import ControlClient
from ipc.errors import ConnectFailed, ConnectionLost, DaemonStarting, RequestFailed
from ipc.wire.codec import decode_client_message, encode
from ipc.wire.completion import Piece
from ipc.wire.messages import PROTOCOL_VERSION, Credit, Error, Generate, Hello, Ping

ROOT = Path(__file__).parent.parent


@pytest.fixture
def client(driver: FakeDriver, address: str) -> Iterator[Client]:  # noqa: ARG001
    """A client of that driver."""
    with Client(address) as client:
        yield client


def test_generate_gives_pieces_and_the_last_has_the_reason(client: Client) -> None:
    """The pieces hold what is new each; usage and reason come with the last."""
    *pieces, last = client.generate("once upon a time")

    assert "".join(piece.text for piece in [*pieces, last]) == "onceuponatime"
    assert [token_id for piece in [*pieces, last] for token_id in piece.token_ids] == [4, 4, 1, 4]
    assert all(piece.finish_reason is None and piece.usage is None for piece in pieces)
    assert (last.finish_reason, last.usage) == ("stop", Usage(1, 4))


def test_complete_gives_the_whole(client: Client) -> None:
    """Text, ids, reason and usage of all pieces together."""
    whole = client.complete("once upon a time")

    assert (whole.text, whole.token_ids) == ("onceuponatime", [4, 4, 1, 4])
    assert (whole.finish_reason, whole.usage) == ("stop", Usage(1, 4))


def test_several_samples_and_their_logprobs_arrive(client: Client, driver: FakeDriver) -> None:
    """Each piece says which sample it belongs to; a whole completion has them in order, with what was asked for."""
    stream = client.generate("hold", n=2)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.complete, "hold", n=2)
        for request in (driver.take(), driver.take()):
            put = request.channel.put
            told = [{7: driver_request.Logprob(-0.5, 1, "b")}]
            put(driver_request.ReturnSample(request_id=request.request_id, prompt_logprobs=[None, *told]))
            put(
                driver_request.ReturnSample(
                    request_id=request.request_id, index=1, text="b", token_ids=[7], logprobs=told
                )
            )
            put(driver_request.ReturnSample(request_id=request.request_id, index=1, finish_reason="repetition"))
            driver.say(request, "a", [5])
            driver.finish(request, "length", 2)
        pieces, completion = list(stream), whole.result()

    assert {piece.index for piece in pieces} == {0, 1}
    assert [piece.usage for piece in pieces].count(Usage(1, 2)) == 1
    assert [(choice.text, choice.finish_reason) for choice in completion.choices] == [
        ("a", "length"),
        ("b", "repetition"),
    ]
    assert completion.choices[1].logprobs == [{7: Logprob(-0.5, 1, "b")}] and completion.logprobs == []
    assert completion.prompt_logprobs == [None, {7: Logprob(-0.5, 1, "b")}]
    assert (completion.text, completion.token_ids, completion.usage) == ("a", [5], Usage(1, 2))


def test_chat_sends_messages(client: Client) -> None:
    """The pieces are those of the answer."""
    pieces = client.chat([{"role": "user", "content": "What is 3 + 4?"}])

    assert "".join(piece.text for piece in pieces) == "Whatis3+4?"


def test_prompts_and_parameters_arrive_as_given(client: Client, driver: FakeDriver) -> None:
    """Token ids stay token ids, and parameters go by the name that the caller gave them."""
    stream = client.generate([1, 5, 9], max_tokens=16, ignore_eos=True, stop=["x"])

    request = driver.take()
    assert request.prompt == [1, 5, 9]
    assert request.params == {"max_tokens": 16, "ignore_eos": True, "stop": ["x"]}
    stream.close()


def test_status_is_a_dict(client: Client) -> None:
    """The numbers of the daemon by name."""
    assert client.status() == {
        "model": "parrot",
        "clients": 1,
        "open_requests": 0,
        "state": "serving",
        "seconds_since_progress": 0.0,
        "weight_version": 1,
        "stages": {"prepare": 0.0, "execution": 0.0, "sockets": 0.0, "control": 0.0},
    }


def test_a_client_knows_what_is_served(client: Client) -> None:
    """The daemon's welcome is there to be read."""
    assert (client.welcome.model, client.welcome.max_model_len) == ("parrot", 256)


def test_pieces_come_as_they_are_made(client: Client, driver: FakeDriver) -> None:
    """A piece can be read before the next one exists."""
    stream = client.generate([1])
    request = driver.take()

    driver.say(request, "first", [1])
    assert next(stream) == Piece("first", [1])
    driver.say(request, "second", [2])
    assert next(stream) == Piece("second", [2])
    driver.finish(request, "length", num_tokens=2)

    assert list(stream) == [Piece("", [], "length", Usage(1, 2))]
    assert list(stream) == []


def test_a_request_starts_when_it_is_made(client: Client, driver: FakeDriver) -> None:
    """Many can be started from one thread and read in any order."""
    streams = [client.generate([number]) for number in range(3)]
    for request in [driver.take() for _ in streams]:
        driver.say(request, f"answer {request.prompt}", [])
        driver.finish(request)

    texts = ["".join(piece.text for piece in stream) for stream in reversed(streams)]

    assert texts == ["answer [2]", "answer [1]", "answer [0]"]


def test_many_threads_share_a_client(client: Client) -> None:
    """Each gets its own answers, whatever the others do."""
    prompts = [f"thread {number} says {'x' * number}" for number in range(200)]

    with ThreadPoolExecutor(32) as threads:
        texts = list(threads.map(lambda prompt: client.complete(prompt).text, prompts))

    assert texts == [prompt.replace(" ", "") for prompt in prompts]


def test_the_whole_path_with_a_fake_engine(address: str) -> None:
    """32 requests at once, through the real driver's threads, are answered to the exact token."""
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    prompts = [f"parrot {number} " for number in range(32)]

    with serving(address, driver), Client(address) as client, ThreadPoolExecutor(32) as threads:
        wholes = list(threads.map(lambda prompt: client.complete(prompt, max_tokens=20), prompts))
        driver.stop("done")

    assert [whole.text for whole in wholes] == [(prompt * 3)[:20] for prompt in prompts]
    assert {whole.finish_reason for whole in wholes} == {"length"}


# Leaving early.


def test_leaving_the_loop_aborts(client: Client, driver: FakeDriver) -> None:
    """A break is enough."""
    stream = client.generate([1])
    request = driver.take()
    driver.say(request, "enough", [1])
    for piece in stream:
        assert piece.text == "enough"
        break
    del stream

    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_an_exception_in_the_loop_aborts(client: Client, driver: FakeDriver) -> None:
    """As any other way out of it."""

    def consume() -> None:
        for _ in client.generate([1]):
            raise ValueError("a mistake of the caller's")

    with ThreadPoolExecutor(1) as thread:
        failure = thread.submit(consume)
        request = driver.take()
        driver.say(request, "x", [1])

        with pytest.raises(ValueError, match="a mistake"):
            failure.result(timeout=PATIENCE)
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_a_stream_never_read_is_aborted_when_dropped(client: Client, driver: FakeDriver) -> None:
    """Nobody can read it any more."""
    stream = client.generate([1])
    request = driver.take()

    del stream

    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_a_stream_can_be_closed_by_another_thread(client: Client, driver: FakeDriver) -> None:
    """Whoever iterates sees its end."""
    stream = client.generate([1])
    request = driver.take()
    with ThreadPoolExecutor(1) as thread:
        pieces = thread.submit(list, stream)

        stream.close()

        assert pieces.result(timeout=PATIENCE) == []
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_a_finished_request_is_not_aborted(client: Client, driver: FakeDriver) -> None:
    """Reading to the end and closing says nothing more to the daemon."""
    with client.generate("to the end") as stream:
        list(stream)
    client.status()

    assert driver.aborted.empty()


# What goes wrong.


def test_a_refused_request_raises_its_code_and_message(client: Client, driver: FakeDriver) -> None:
    """And the client can be used again."""
    driver.refusal = Overloaded("too many wait")
    with pytest.raises(RequestFailed, match="too many wait") as failure:
        client.complete("x")
    driver.refusal = None

    assert failure.value.code == "overloaded"
    assert client.complete("x").text == "x"


def test_a_refusal_passes_between_processes() -> None:
    """By pickle, as a pool of processes has it: with all that it says."""
    copied = pickle.loads(pickle.dumps(RequestFailed("overloaded", "too many wait", 1.5)))

    assert isinstance(copied, RequestFailed)
    assert (copied.code, copied.message, copied.retry_after_s, str(copied)) == (
        "overloaded", "too many wait", 1.5, "too many wait",
    )  # fmt: skip


def test_a_message_too_long_is_refused_before_it_is_sent(client: Client, driver: FakeDriver) -> None:
    """The limit is the one that the daemon told."""
    with pytest.raises(RequestFailed, match=str(MAX_MESSAGE_BYTES)) as failure:
        client.complete("x" * MAX_MESSAGE_BYTES)

    assert failure.value.code == "message_too_long"
    assert not driver.open
    assert client.complete("x").text == "x"


@pytest.mark.parametrize("prompt", [[1.5], {"text": "x"}, b"bytes"])
def test_a_prompt_of_a_wrong_type_is_an_invalid_request(client: Client, prompt: object) -> None:
    """The daemon's words say where it is wrong."""
    with pytest.raises(RequestFailed, match="prompt") as failure:
        client.complete(prompt)  # type: ignore[arg-type]

    assert failure.value.code == "invalid_request"


def test_what_cannot_be_encoded_is_an_error_of_the_caller(client: Client) -> None:
    """It never leaves the process, and is refused as the daemon would refuse it."""
    nested: list[Any] = []
    for _ in range(100_000):  # deeper than any version of Python follows
        nested = [nested]
    for question, why in (
        ({"temperature": object()}, "no message can hold this: Encoding objects of type object is unsupported"),
        ({"seed": 2**64}, "^seed: a number is too large"),
        ({"logit_bias": {2**64: 1.0}}, "^logit_bias: a number is too large"),
        (
            {"structured_outputs": {"json": {"enum": [-(2**63), 2**70]}}},
            r"^structured_outputs\.json\.enum\[1\]: a number",
        ),
        ({"stop": "\ud800"}, "half a surrogate pair at character 0"),
        ({"stop": nested}, "it is nested too deeply: maps and lists may be 64 deep"),
    ):
        with pytest.raises(RequestFailed, match=why) as failure:
            client.generate("x", **question)
        assert failure.value.code == "invalid_request"
    with pytest.raises(RequestFailed, match="half a surrogate pair at character 13"):
        client.tokenize("half a pair: \ud800")


def test_without_a_daemon_connecting_fails_in_words(address: str) -> None:
    """The message says where nobody answered and what to do."""
    with pytest.raises(ConnectFailed, match=f"no daemon answers at {address}: start one with `odriver serve`"):
        Client(address, timeout=0.1)


def why_not(address: str, words: str, key: Path | None = None) -> ConnectFailed:
    """Why a client that waits too short a time is not connected: for these words, if it has time to hear them."""
    for timeout in (0.5, 5.0, PATIENCE):  # a busy machine may take its time
        with pytest.raises(ConnectFailed) as failure:
            Client(address, timeout, key=key)
        if re.search(words, str(failure.value)):
            break
    return failure.value


def leave_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had no file left for the second of a session's sockets."""

    def fail(*args: object) -> None:
        del args
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", fail)


@pytest.mark.parametrize("kind", [Client, ControlClient])
def test_without_room_for_a_socket_connecting_fails_in_words(
    driver: FakeDriver, address: str, monkeypatch: pytest.MonkeyPatch, kind: type[Client | ControlClient]
) -> None:
    """And leaves nothing that its end would wait for."""
    del driver
    with monkeypatch.context() as patch:
        leave_no_files(patch)
        with pytest.raises(ConnectFailed, match=r"cannot connect to .*: Too many open files"):
            kind(address)

    with kind(address) as client:
        assert client.status()["state"] == "serving"


FEW_FILES = """
import os, resource
from ipc.{module} import {name}
from ipc.errors import ConnectFailed

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
held = []
try:
    while True:
        held.append(os.eventfd(0))
except OSError:
    pass
for _ in range(8):
    try:
        {name}("ipc:///nowhere", timeout=0.0)
    except ConnectFailed as error:
        assert "Too many open files" in str(error), error
    os.close(held.pop())
"""


@pytest.mark.parametrize(("module", "name"), [("client", "Client"), ("control_client", "ControlClient")])
def test_a_process_with_few_files_left_is_told_so(module: str, name: str) -> None:
    """And is not aborted by libzmq, which its threads do that get none."""
    program = FEW_FILES.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_daemon_that_does_not_answer_is_said_to_be_there(address: str) -> None:
    """One that hangs accepts connections; one that is loading its model says that it is."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stuck:
        stuck.bind(address)
        assert "does not answer" in str(why_not(address, "does not answer"))
    server = build_server(address)
    server.start()

    try:
        starting = why_not(address, "is starting: starting")
        assert isinstance(starting, DaemonStarting) and "is starting: starting" in str(starting)
    finally:
        server.stop()


def test_a_daemon_that_is_just_starting_is_waited_for(address: str) -> None:
    """A client may be made before the daemon is there."""
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(Client, address, PATIENCE)
        with serving(address, FakeDriver()), connecting.result(PATIENCE) as client:
            assert client.complete("x").text == "x"


def test_a_client_may_wait_for_ever(driver: FakeDriver, address: str) -> None:
    """A timeout can be infinite."""
    with Client(address, timeout=float("inf")) as client:
        assert client.complete("x").text == "x"
    assert len(driver.submitted) == 1


def test_a_daemon_of_another_version_refuses_the_client(
    driver: FakeDriver, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting fails with the daemon's own words."""
    monkeypatch.setattr(session, "_HELLO", encode(Hello(PROTOCOL_VERSION + 1)))

    with pytest.raises(ConnectFailed, match=f"speaks version {PROTOCOL_VERSION}"):
        Client(address, timeout=PATIENCE)
    assert not driver.open


def test_a_stopping_daemon_tells_why(address: str) -> None:
    """Open requests fail with its reason, not with a lost connection."""
    driver = FakeDriver()
    with serving(address, driver), Client(address) as client:
        stream = client.generate([1])
        driver.take()
        driver.stop("the operator said so")

        with pytest.raises(RequestFailed, match="the operator said so") as failure:
            next(stream)
    assert failure.value.code == "stopped"


def test_a_daemon_that_goes_away_fails_what_is_open(address: str) -> None:
    """And the next request finds the next daemon."""
    driver = FakeDriver()
    with serving(address, driver):
        client = Client(address)
        stream = client.generate([1])
        driver.take()

    with pytest.raises(ConnectionLost, match="went away"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    with serving(address, FakeDriver()):
        assert client.complete("again").text == "again"
    client.close()


class Router:
    """A daemon that says welcome, and otherwise only what the test says."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._identity = b""

    def is_told(self, seconds: float) -> bool:
        return bool(self._socket.poll(1000 * seconds))

    def hear(self) -> object:
        assert self.is_told(PATIENCE), "nobody said anything"
        self._identity, frame = self._socket.recv_multipart()
        return decode_client_message(frame)

    def say(self, frame: bytes) -> None:
        self._socket.send_multipart([self._identity, frame])

    def welcome(self) -> None:
        assert isinstance(self.hear(), Hello)
        self.say(encode(WELCOME))

    def die(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def router(address: str) -> Iterator[Router]:
    """A daemon that the test speaks for."""
    router = Router(address)
    yield router
    router.die()


def test_a_daemon_that_hangs_is_noticed(router: Router, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open request fails when pings go unanswered: no call hangs for ever."""
    monkeypatch.setattr(session, "PING_INTERVAL", 0.2)
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(Client, address)
        router.welcome()
        with connecting.result(PATIENCE) as client:
            stream = client.generate("x")
            while not isinstance(router.hear(), Generate):
                pass
            monkeypatch.setattr(session, "SILENCE_LIMIT", 0.2)

            with pytest.raises(ConnectionLost, match="has not answered"):
                next(stream)


def welcomed(router: Router, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> session.Session:
    """A session without a thread, which has got so far at 0.0."""
    poller = zmq.Poller()
    begun = session.Session(context, address, poller, None)
    while not begun.reached and poller.poll(PATIENCE * 1000):
        list(begun.receive(now=0.0))
    router.welcome()
    while begun.welcome is None and poller.poll(PATIENCE * 1000):
        list(begun.receive(now=0.0))
    return begun


def test_a_client_that_was_frozen_does_not_blame_the_daemon(router: Router, address: str) -> None:
    """After a pause of its own it pings, and takes the daemon for lost only if that goes unanswered for as long as ever."""
    with zmq.Context() as context:
        frozen = welcomed(router, context, address)

        frozen.keep_alive(now=600.0)
        assert frozen.lost is None
        assert router.hear() == Ping()
        for now in (605.0, 610.0, 615.0, 620.0, 625.0, 630.0):
            frozen.keep_alive(now)
        assert frozen.lost is None

        frozen.keep_alive(now=635.0)
        assert "has not answered" in frozen.lost
        frozen.close()


def test_what_the_next_daemon_says_before_hello_is_no_answer(router: Router, address: str) -> None:
    """A message that was meant for the one before reaches it, as the loss was not noticed: that is lost, and not refused."""
    with zmq.Context() as context:
        session_ = welcomed(router, context, address)
        session_.send(encode(Generate("1", prompt="x")))
        assert isinstance(router.hear(), Generate)
        router.die()
        following = Router(address)
        for _ in range(10 * PATIENCE):  # one that is on its way when the connection ends is lost with it
            session_.send(encode(Credit("1", 1)))
            if following.is_told(0.1):
                break
        assert isinstance(following.hear(), Credit)
        following.say(encode(Error("1", "invalid_request", "say hello first")))
        assert session_._dealer.poll(PATIENCE * 1000)

        assert list(session_.receive(now=0.0)) == []

        assert "went away" in (session_.lost or "")
        session_.close()
        following.die()


def test_an_idle_client_pings(router: Router, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon need not take it for lost."""
    monkeypatch.setattr(session, "PING_INTERVAL", 0.05)
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(Client, address)
        router.welcome()
        with connecting.result(PATIENCE):
            assert router.hear() == Ping()
            assert router.hear() == Ping()


@pytest.mark.parametrize(
    "frame", [b"\xc1", encode(Error(None, "invalid_request", "say hello first"))], ids=["rubbish", "error"]
)
def test_a_connection_that_the_daemon_gives_up_is_lost(router: Router, address: str, frame: bytes) -> None:
    """What is no message of this version, or an error of no request, ends what is open."""
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(Client, address)
        router.welcome()
        with connecting.result(PATIENCE) as client:
            stream = client.generate([1])
            router.hear()

            router.say(frame)

            with pytest.raises(ConnectionLost):
                next(stream)


def test_a_daemon_that_dies_is_noticed(router: Router, address: str) -> None:
    """Without a word of its own."""
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(Client, address)
        router.welcome()
        with connecting.result(PATIENCE) as client:
            stream = client.generate([1])
            router.hear()

            router.die()

            with pytest.raises(ConnectionLost, match="went away"):
                next(stream)


# The client's own life.


def test_close_wakes_whoever_waits(client: Client, driver: FakeDriver) -> None:
    """They get ConnectionLost, and the daemon stops working for them."""
    streams = [client.generate([number]) for number in range(4)]
    requests = {driver.take().request_id for _ in streams}
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(next, stream) for stream in streams]

        client.close()

        for outcome in waiting:
            with pytest.raises(ConnectionLost, match="closed"):
                outcome.result(timeout=PATIENCE)
    assert {driver.aborted.get(timeout=PATIENCE) for _ in streams} == requests


def test_a_closed_client_says_so(client: Client) -> None:
    """Closing twice is no error; asking afterwards is."""
    client.close()
    client.close()

    with pytest.raises(ConnectionLost, match="closed"):
        client.complete("x")
    with pytest.raises(ConnectionLost, match="closed"):
        client.status()


def test_a_client_nobody_holds_lives_as_long_as_its_stream(driver: FakeDriver, address: str) -> None:
    """A loop over a temporary client's stream runs to its end."""
    stream = Client(address).generate([1])
    gc.collect()
    request = driver.take()
    driver.say(request, "alive", [])
    driver.finish(request)

    assert "".join(piece.text for piece in stream) == "alive"


def run_python(code: str, *arguments: str) -> str:
    """The output of a script in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_loads_nothing_heavy() -> None:
    """A program that only asks needs neither jax nor transformers nor numpy."""
    code = "import sys, odriver, ipc.async_client, ipc.client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = run_python(code).split()

    assert not {"jax", "flax", "transformers", "tokenizers", "numpy", "rich"} & set(loaded)


@pytest.mark.usefixtures("driver")
def test_clients_leave_no_threads_and_no_descriptors(address: str) -> None:
    """Neither those that were closed, nor those that were dropped, nor those that never got through."""
    code = """
import gc, os, sys, threading
from ipc.client import Client
from ipc.errors import ConnectFailed
def count():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
Client(sys.argv[1]).close()
before = count()
for _ in range(5):
    with Client(sys.argv[1]) as closed:
        closed.complete("x")
    dropped = Client(sys.argv[1])
    dropped.generate([1])
    del closed, dropped
    try:
        Client(sys.argv[1] + "x", timeout=0.01)
    except ConnectFailed:
        pass
print(before == count())
"""
    assert run_python(code, address) == "True\n"


@pytest.mark.usefixtures("driver")
def test_a_client_left_open_does_not_hold_up_the_exit(address: str) -> None:
    """A script may end without closing anything."""
    code = """
import sys
from ipc.client import Client
client = Client(sys.argv[1])
stream = client.generate([1])
print(client.complete("bye").text)
"""
    assert run_python(code, address) == "bye\n"


@pytest.mark.usefixtures("driver")
def test_a_forked_child_is_told_to_make_its_own_client(address: str) -> None:
    """The thread did not come along, whatever of the parent's is used; the parent's client is unharmed."""
    code = """
import os, sys
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import ConnectionLost
client, control = Client(sys.argv[1]), ControlClient(sys.argv[1])
stream = client.generate([1])
if os.fork() == 0:
    for use in (lambda: client.complete("x"), lambda: next(stream), client.connect, control.status):
        try:
            use()
        except ConnectionLost as error:
            print(error)
    client.close()
    with Client(sys.argv[1]) as own:
        print(client.is_connected, own.complete("child").text, flush=True)
    os._exit(0)
os.wait()
print(control.status()["open_requests"], client.complete("parent").text)
"""
    *errors, child, parent = run_python(code, address).splitlines()

    assert ["forked" in error for error in errors] == [True] * 4
    assert (child, parent) == ("False child", "1 parent")


def test_a_long_text_s_token_ids_come_whole(address: str) -> None:
    """However many they are, they are one answer."""
    with serving(address, FakeDriver()), Client(address) as client:
        assert client.tokenize("word " * 50_000) == [4] * 50_000
