"""Clients with ``resume`` against daemons that come and go."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer
from test_client import Router, leave_no_files

from driver import request as driver_request
from driver.adapters.registry import AdapterRegistry
from driver.errors import Asleep, Draining, DriverError, DriverStopped, Overloaded
from driver.odriver import oDriver
from driver.request import ActiveRequest, RequestError, ReturnSample, Usage
from engine.adapters.adapter import Adapter
from engine.request_limits import MAX_MESSAGE_BYTES, MAX_VALUES
from engine.scheduling.sequence import SequenceOutput
from ipc.async_client import AsyncClient, AsyncStream, succeeded
from ipc.client import Client
from ipc.connection import retry as resumption
from ipc.connection.call import Call, Interrupted, request_frame
from ipc.connection.retry import Resumption
from ipc.errors import ConnectFailed, ConnectionLost, RequestFailed, ResumeFailed
from ipc.wire.codec import encode
from ipc.wire.completion import Piece
from ipc.wire.messages import Done, Error, Generate, Hello, ListAdapters, Token, Tokenize


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client that resumes; it was connected once, to a daemon that has gone."""
    with serving(address, FakeDriver()):
        client = Client(address, resume=True, resume_timeout=PATIENCE)
    with client:
        yield client


def test_a_stream_goes_on_with_the_next_daemon(client: Client, address: str) -> None:
    """It asks for the same, with the same seed, and says what it has; its reader sees one stream."""
    first, second = FakeDriver(), FakeDriver()
    messages = [{"role": "user", "content": "hold"}]
    with serving(address, first):
        stream = client.chat(messages, temperature=1, logit_bias={5: 2.0})
        request = first.take()
        messages.append({"role": "assistant", "content": "not of this request"})
        first.say(request, "once", [1, 2])
        assert next(stream) == Piece("once", [1, 2])
    with serving(address, second):
        resumed = second.take()
        second.say(resumed, " upon", [3])
        second.finish(resumed, "length", 3)
        rest = list(stream)

    assert [piece.text for piece in rest if piece.text] == [" upon"]
    assert [token_id for piece in rest for token_id in piece.token_ids] == [3]
    assert (rest[-1].finish_reason, rest[-1].usage) == ("length", Usage(1, 3))
    assert resumed.messages == request.messages and resumed.params == request.params
    assert 0 <= request.params["seed"] < 2**32
    assert (request.resume_token_ids, resumed.resume_token_ids) == ([], [[1, 2]])


@pytest.mark.parametrize(
    ("earlier", "later", "versions"),
    [
        ([], [(1, 2)], []),
        ([], [(2, 2)], [(1, 0), (2, 2)]),
        ([(2, 0)], [(1, 2)], [(2, 0), (1, 2)]),
        ([(2, 0), (3, 1)], [(3, 2), (4, 3)], [(2, 0), (3, 1), (4, 3)]),
        ([(2, 1)], [], [(1, 0), (2, 1)]),
    ],
)
def test_the_versions_of_its_weights_are_those_that_each_daemon_named(
    client: Client,
    address: str,
    earlier: list[tuple[int, int]],
    later: list[tuple[int, int]],
    versions: list[tuple[int, int]],
) -> None:
    """By the place in the whole; nothing where the weights of the start made all."""
    first, second = FakeDriver(), FakeDriver()
    with serving(address, first):
        stream = client.generate("hold")
        first.say(first.take(), "once", [1, 2], weight_versions=earlier)
        assert next(stream) == Piece("once", [1, 2])
    second.weight_versions = later
    with serving(address, second):
        resumed = second.take()
        second.say(resumed, " upon", [3, 4])
        second.finish(resumed, "length", 4)

        assert list(stream)[-1].weight_versions == versions


def test_a_stream_goes_on_over_another_connection(address: str) -> None:
    """With a daemon that lives on, when it was only the connection that was lost."""
    router = Router(address)
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(lambda: Client(address, resume=True))
        router.welcome()
        with connecting.result(PATIENCE) as client:
            stream = client.generate("once")
            request = router.hear()
            assert isinstance(request, Generate)
            router.say(encode(Token(request.request_id, "upon", [4])))
            router.say(encode(Error(None, "invalid_request", "say hello first")))
            router.welcome()
            assert router.hear() == msgspec.structs.replace(request, resume_token_ids=[[4]])
            router.say(encode(Done(request.request_id, "a", [1], "stop", Usage(1, 2))))

            assert [piece.text for piece in stream] == ["upon", "a"]
    router.die()


def test_a_question_to_the_tokenizer_is_asked_again(client: Client, address: str) -> None:
    """One that was open when the daemon went away, and one that is asked meanwhile; adapters are the daemon's own, and
    are not."""
    gone = Router(address)
    with ThreadPoolExecutor(3) as threads:
        asked = threads.submit(client.tokenize, "once")
        gone.welcome()
        assert isinstance(gone.hear(), Tokenize)
        listed = threads.submit(client.adapters)
        assert isinstance(gone.hear(), ListAdapters)
        gone.say(encode(Error(None, "stopped", "the daemon ends")))
        gone.die()
        with pytest.raises(ConnectionLost):
            listed.result(PATIENCE)
        meanwhile = threads.submit(client.detokenize, [1])
        with serving(address, FakeDriver()):
            assert asked.result(PATIENCE) == client.tokenize("once")
            assert meanwhile.result(PATIENCE) == client.detokenize([1])


def test_a_seed_that_was_given_stays(client: Client, address: str) -> None:
    """None is drawn then."""
    with serving(address, driver := FakeDriver()):
        client.complete("x", seed=3)

    assert driver.submitted[0].params["seed"] == 3


def test_samples_are_resumed_each_where_it_was(client: Client, address: str) -> None:
    """The end of one is not told twice, nor is the prompt's part that was there."""
    first, second = FakeDriver(), FakeDriver()
    known: list[dict[int, driver_request.Logprob] | None] = [{n: driver_request.Logprob(-n, 1)} for n in range(3)]

    def put(request: ActiveRequest, **fields: object) -> None:
        request.channel.put(ReturnSample(request_id=request.request_id, **fields))  # type: ignore[arg-type]

    with serving(address, first):
        stream = client.generate("hold", n=2, prompt_logprobs=0)
        request = first.take()
        put(request, prompt_logprobs=[None, known[0]])
        put(request, index=1, text="b", token_ids=[7], finish_reason="stop")
        pieces = [next(stream), next(stream)]
    with serving(address, second):
        resumed = second.take()
        put(resumed, index=1, finish_reason="stop")
        put(resumed, prompt_logprobs=[None])
        put(resumed, prompt_logprobs=known)
        second.finish(resumed, "length", 2)
        pieces += list(stream)

    assert resumed.resume_token_ids == [[], [7]]
    assert [list(token or ()) for piece in pieces for token in piece.prompt_logprobs] == [[], [0], [1], [2]]
    assert [(piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason] == [
        (1, "stop"),
        (0, "length"),
    ]


def test_a_request_begun_while_nobody_is_there_waits_too(client: Client, address: str) -> None:
    """It is like one that was cut off before its first token."""
    stream = client.generate("once upon")

    with serving(address, FakeDriver()):
        assert "".join(piece.text for piece in stream) == "onceupon"


def test_a_daemon_that_stops_is_outlived(client: Client, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it ended the request or never took it; the error is the log's to see, once, and not the caller's."""
    first, second = FakeDriver(), FakeDriver()
    with ThreadPoolExecutor(2) as threads:
        with serving(address, first):
            cut = threads.submit(client.complete, "hold")
            first.say(first.take(), "cut", [1])
            first.refusal = DriverStopped("it drains")
            late = threads.submit(client.complete, "too late")
            while len(first.submitted) < 2:
                pass
            first.stop("the operator said so")
        with serving(address, second):
            request = second.take()
            second.finish(request, "length", 1)

            assert late.result(PATIENCE).text == "toolate"
            assert (cut.result(PATIENCE).text, request.resume_token_ids) == ("cut", [[1]])
    told = [
        record.message
        for record in caplog.records
        if record.name == "ipc.connection.call_table" and record.levelname == "WARNING"
    ]
    assert [message.partition(": ")[0] for message in told] == ["it drains", f"the daemon at {address} went away"]


@pytest.mark.parametrize("refusal", [Draining("it drains"), Asleep("it sleeps")])
def test_who_has_another_daemon_has_only_what_was_cut_off_wait_for_one(address: str, refusal: DriverError) -> None:
    """For one that takes nothing new: a new request is told so."""

    async def told() -> None:
        async def successor(interrupted: Interrupted) -> AsyncClient:
            if interrupted.failure is None:
                raise interrupted.why
            return client

        client = succeeded(AsyncClient(address, resume=True, resume_timeout=PATIENCE), successor)
        with serving(address, first := FakeDriver()):
            await client.connect()
            stream = client.generate([1])
            first.take()
        second = FakeDriver()
        second.refusal = refusal
        with serving(address, second):
            await client.connect()
            rest = asyncio.create_task(_all_of(stream))
            while not second.submitted:
                await asyncio.sleep(0)
            with pytest.raises(RequestFailed, match=str(refusal)):
                await client.complete("x")
            second.refusal = None
            second.finish(await asyncio.to_thread(second.take))

            assert (await rest)[-1].finish_reason == "stop"
        await client.close()

    asyncio.run(told())


async def _all_of(stream: AsyncStream) -> list[Piece]:
    return [piece async for piece in stream]


def test_only_what_was_cut_off_is_pressed_on_a_daemon_that_has_too_much_to_do(client: Client, address: str) -> None:
    """A new request is its caller's to repeat."""
    with serving(address, first := FakeDriver()):
        stream = client.generate([1])
        first.take()
    with serving(address, second := FakeDriver()):
        second.refusal = Overloaded("too many wait")
        while not second.submitted:
            pass
        with pytest.raises(RequestFailed, match="too many wait"):
            client.complete("x")
        second.refusal = None
        second.finish(second.take())

        assert list(stream)[-1].finish_reason == "stop"


def test_what_was_cut_off_waits_for_its_adapter_to_be_loaded_again(
    client: Client, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that is started again has none that an operator had loaded; a new request for it is refused."""
    adapter = Adapter(1, "sales", 8, ())
    with serving(address, first := FakeDriver(), enable_lora=True):
        first.adapters.put("sales", adapter, "sales", pin=False)
        stream = client.generate([1], model="sales")
        first.say(first.take(), "cut", [1])
        assert next(stream).text == "cut"
    with serving(address, second := FakeDriver(), enable_lora=True):
        while not second.submitted:
            pass
        with pytest.raises(RequestFailed, match="no model or adapter 'sales'"):
            client.complete("x", model="sales")
        second.adapters.put("sales", adapter, "sales", pin=False)
        second.finish(request := second.take())

        assert list(stream)[-1].finish_reason == "stop"
    assert (request.model, request.resume_token_ids) == ("sales", [[1]])
    assert "no model or adapter 'sales' is served here: there is parrot: 1 requests wait up to" in caplog.text


def test_the_error_of_what_waited_in_vain_for_its_adapter_says_so(address: str) -> None:
    """With how long it waited."""
    with serving(address, first := FakeDriver(), enable_lora=True):
        first.adapters.put("sales", Adapter(1, "sales", 8, ()), "sales", pin=False)
        client = Client(address, resume=True, resume_timeout=0.3)
        stream = client.generate([1], model="sales")
        first.take()

    words = r"no model or adapter 'sales' .*; within 0\.3 s it could not be resumed"
    with serving(address, FakeDriver(), enable_lora=True), client, pytest.raises(ConnectionLost, match=words):
        next(stream)


def test_only_a_daemon_that_serves_adapters_is_waited_for(client: Client, address: str) -> None:
    """Another will never have it: its refusal is the answer, and so it is to a question to the tokenizer."""
    with serving(address, first := FakeDriver(), enable_lora=True):
        first.adapters.put("sales", Adapter(1, "sales", 8, ()), "sales", pin=False)
        stream = client.generate([1], model="sales")
        first.say(first.take(), "cut", [1])
        assert next(stream).text == "cut"

    with serving(address, FakeDriver()), pytest.raises(RequestFailed, match="no model or adapter 'sales'"):
        next(stream)


def test_a_model_that_has_lost_the_name_of_a_request_goes_on_with_it(client: Client, address: str) -> None:
    """As it is the same; a new request under that name is refused."""
    with serving(address, first := FakeDriver(), aliases=["macaw"], enable_lora=True):
        first.adapters = AdapterRegistry(8, ("parrot", "macaw"), lambda _: None)
        stream = client.generate([1], model="macaw")
        assert first.take().model == "macaw"
    with serving(address, second := FakeDriver(), enable_lora=True):
        second.finish(second.take())
        assert list(stream)[-1].finish_reason == "stop"
        with pytest.raises(RequestFailed, match="no model or adapter 'macaw'"):
            client.tokenize("x", model="macaw")


def test_what_an_adapter_began_the_model_does_not_go_on_with(client: Client, address: str) -> None:
    """Where that has its name now."""
    with serving(address, first := FakeDriver(), enable_lora=True):
        first.adapters.put("sales", Adapter(1, "sales", 8, ()), "sales", pin=False)
        stream = client.generate([1], model="sales")
        first.say(first.take(), "cut", [1])
        assert next(stream).text == "cut"

    words = "'sales' was an adapter, and is the model itself now"
    with serving(address, FakeDriver(), aliases=["sales"]), pytest.raises(ResumeFailed, match=words):
        next(stream)


def test_a_daemon_without_room_for_a_connection_is_tried_again(
    client: Client, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """For what was cut off, and for what was begun since; the log says it once."""
    with serving(address, first := FakeDriver()):
        stream = client.generate([1])
        first.say(first.take(), "cut", [1])
        assert next(stream).text == "cut"
    full = Router(address)
    late = client.generate([2])
    for _ in range(2):
        assert isinstance(full.hear(), Hello)
        full.say(encode(Error(None, "overloaded", "close some")))
    full.die()
    with serving(address, second := FakeDriver()):
        for request in (second.take(), second.take()):
            second.finish(request)

        assert [list(each)[-1].finish_reason for each in (stream, late)] == ["stop"] * 2
    assert caplog.text.count("close some") == 1


def test_a_client_without_room_for_a_socket_tries_again(
    client: Client, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not resumed is told why at once; once there are files to open, all goes on."""
    with monkeypatch.context() as patch:
        leave_no_files(patch)
        stream = client.generate("once")
        with pytest.raises(ConnectFailed, match=r"cannot connect to .*: Too many open files"):
            client.adapters()
    with serving(address, FakeDriver()):
        assert "".join(piece.text for piece in stream) == "once"
        assert client.tokenize("once") == [4]


def test_a_fault_of_the_daemon_is_outlived_once(client: Client, address: str) -> None:
    """As it may be the request that brings it about; what is new between two makes them two."""

    def fail(request: ActiveRequest) -> None:
        del driver.open[request.request_id]
        fault = RequestError("internal", "the device is on fire")
        request.channel.put(ReturnSample(request_id=request.request_id, error=fault))

    with serving(address, driver := FakeDriver()):
        stream = client.generate([1])
        fail(driver.take())
        request = driver.take()
        driver.say(request, "on", [5])
        assert next(stream).text == "on"
        fail(request)
        fail(driver.take())

        with pytest.raises(RequestFailed, match="the device is on fire"):
            next(stream)


def test_a_request_with_which_daemons_go_is_given_up(client: Client, address: str) -> None:
    """Should it be what kills them, it does so three times and not for ever, and the caller hears that."""
    stream = client.generate([1])
    for _ in range(3):
        with serving(address, driver := FakeDriver()):
            driver.take()

    with pytest.raises(ConnectionLost, match="went away; 3 daemons in a row went away with this request"):
        next(stream)


def test_only_a_token_shows_that_it_is_not_the_request(client: Client, address: str) -> None:
    """What it says of its prompt comes again each time; with a token between, daemons may go on going."""
    stream = client.generate([1], prompt_logprobs=0)
    for round_ in range(4):
        with serving(address, driver := FakeDriver()):
            request = driver.take()
            logprobs = [None, {1: driver_request.Logprob(-0.5, 1)}]
            request.channel.put(ReturnSample(request_id=request.request_id, prompt_logprobs=logprobs))
            if round_ == 1:
                driver.say(request, "on", [5])
            next(stream)

    with pytest.raises(ConnectionLost, match="3 daemons in a row"):
        list(stream)


def test_what_waits_can_be_left(client: Client, address: str) -> None:
    """The next daemon hears nothing of it."""
    with serving(address, first := FakeDriver()):
        stream = client.generate([1])
        first.take()
    stream.close()
    with serving(address, second := FakeDriver()):
        assert client.complete("x").text == "x"

    assert [request.prompt for request in second.submitted] == ["x"]


def test_a_daemon_that_does_not_come_back_is_not_waited_for_for_ever(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller hears what happened and how long was waited; the log said so when it began."""
    with serving(address, driver := FakeDriver()):
        client = Client(address, resume=True, resume_timeout=0.3)
        stream = client.generate([1])
        driver.take()

    words = r"went away; within 0\.3 s it could not be resumed"
    with caplog.at_level(logging.INFO, "ipc"), client, pytest.raises(ConnectionLost, match=words):
        next(stream)
    assert "1 requests wait up to 0.3 s to be resumed" in caplog.text


def test_another_model_cannot_go_on(client: Client, address: str) -> None:
    """The error names both."""
    with serving(address, driver := FakeDriver()):
        stream = client.generate([1])
        driver.take()
    with (
        serving(address, FakeDriver(), model="owl"),
        pytest.raises(ResumeFailed, match="serves owl"),
    ):
        next(stream)


def test_what_no_daemon_takes_ends_alone() -> None:
    """Where the daemon went before it could refuse it: the others of the client wait on."""
    put: list[object] = []
    frame = request_frame(Generate("1", "x", None, params={"bad_words": ["x"] * (MAX_VALUES + 1)}))
    call = Call("1", frame, put.append, 0.0, resumption=Resumption(frame, 0.0, ""))

    assert not call.lose(ConnectionLost("gone"), 0.0, 10.0)

    assert [type(one) for one in put] == [RequestFailed]


def test_an_output_too_long_to_be_sent_back_is_refused(client: Client, address: str) -> None:
    """By the daemon's limit, before it is sent."""
    with serving(address, driver := FakeDriver()):
        stream = client.generate([1])
        num_tokens = MAX_MESSAGE_BYTES // 5
        driver.say(driver.take(), "", [2**30] * num_tokens)
        while num_tokens > 0:  # it comes in parts
            num_tokens -= len(next(stream).token_ids)
    with serving(address, FakeDriver()), pytest.raises(RequestFailed, match="a message may have"):
        next(stream)


def test_a_queue_timeout_is_over_with_the_first_token(client: Client, address: str) -> None:
    """Whoever has none still waits in the queue."""
    with serving(address, first := FakeDriver()):
        streams = [client.generate([number], queue_timeout_s=500) for number in range(2)]
        first.say(first.take(), "begun", [1])
        next(streams[0])
    with serving(address, second := FakeDriver()):
        begun, waiting = sorted((second.take() for _ in streams), key=lambda request: str(request.prompt))

    assert "queue_timeout_s" not in begun.params and 400 < waiting.params["queue_timeout_s"] < 500


def test_a_timeout_goes_on_counting(client: Client, address: str) -> None:
    """What is left of it is asked for; what is used up is a moment, so that the daemon ends it in order."""
    with serving(address, first := FakeDriver()):
        streams = [client.generate([1], timeout_s=1e-4), client.generate([1], timeout_s=500)]
        for _ in streams:
            first.take()
    with serving(address, second := FakeDriver()):
        used_up, left = sorted(second.take().params["timeout_s"] for _ in streams)

    assert 0 < used_up <= 1e-3 and 400 < left < 500


PROMPTS = [f"é😀 {number} " for number in range(12)]
EXPECTED = [(prompt.encode() * 20)[:100].decode(errors="replace") for prompt in PROMPTS]
STEPS = (60, 1, 7, 110, 33)
"""How many steps the engines make, one after the other, before they are no more."""


class MortalEngine(FakeEngine):
    """Makes so many steps, and tells when it has."""

    def __init__(self, lifetime: int) -> None:
        super().__init__()
        self.spent, self.ended = threading.Event(), threading.Event()
        self._lifetime = lifetime

    def step(self) -> list[SequenceOutput]:
        if self.steps == self._lifetime:
            self.spent.set()
            self.ended.wait()
            return []
        return super().step()


def serve_in_turn(address: str) -> None:
    """Daemons that go away, each in the middle of everything, without a word."""
    for lifetime in STEPS:
        engine = MortalEngine(lifetime)
        driver = oDriver(engine, FakeTokenizer())
        driver.start()
        with serving(address, driver):
            assert engine.spent.wait(PATIENCE)
        engine.ended.set()
        driver.stop("it is no more")


def test_daemons_come_and_go_and_every_text_is_whole(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the client of threads and for that of tasks; half characters are cut and healed."""
    monkeypatch.setattr(resumption, "MAX_LOSSES", len(STEPS) + 1)  # who waits through all of them has no token between

    async def ask_all() -> list[str]:
        async with AsyncClient(address, PATIENCE, resume=True, resume_timeout=PATIENCE) as client:
            wholes = await asyncio.gather(*(client.complete(prompt, max_tokens=100) for prompt in PROMPTS))
        return [whole.text for whole in wholes]

    with ThreadPoolExecutor(2) as threads:
        tasks = threads.submit(asyncio.run, ask_all())
        daemons = threads.submit(serve_in_turn, address)
        with Client(address, PATIENCE, resume=True, resume_timeout=PATIENCE) as client:
            streams = [client.generate(prompt, max_tokens=100) for prompt in PROMPTS]
            daemons.result(PATIENCE)
            last = oDriver(FakeEngine(), FakeTokenizer())
            last.start()
            with serving(address, last):
                texts = ["".join(piece.text for piece in stream) for stream in streams]
                assert texts == EXPECTED == tasks.result(PATIENCE)
            last.stop("the test is over")
