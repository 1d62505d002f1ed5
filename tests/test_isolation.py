"""Whatever is raised while one request is worked on ends that request, and everybody else is served as if nothing was.

A test breaks one function, for the request that is named "poison" alone.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer
from gateways import CHAT, TEXT, chat, events, gateway
from raw_client import RawClient
from test_driver import Listener, error_of

import driver.prepare_inputs
import driver.process_summary
import ipc.gateway.endpoints.completions
import ipc.server.work.client_table
import ipc.server.work.requests
import ipc.server.work.stream
from driver.execution.deadlines import Deadlines
from driver.grammars.compiler import GrammarCompiler
from driver.metrics.request_log import RequestLog
from driver.metrics.request_metrics import SampleTimes
from driver.odriver import oDriver
from driver.prepare_inputs import PrepareInputs
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest
from driver.stages.stage import MAX_FAILURES, Stage
from driver.text.detokenizer import Detokenizer
from driver.text.sample_text import SampleLogprobs, SampleText
from driver.text.stops import StopStrings
from ipc.gateway.endpoints.chat_chunks import ChatChunks
from ipc.gateway.endpoints.text_chunks import TextChunks
from ipc.server.control import Control
from ipc.server.work.delivery import Delivery
from ipc.server.work.stream import SampleStream
from ipc.wire.addresses import control_address
from ipc.wire.messages import Abort, Credit, Detokenize, Done, Error, Generate, Tokenize, TokenizerInfo
from ipc.wire.operations import Metrics, Status

Break = Callable[[Any, str], None]

BUG = "what nobody thought of"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Breaks a function of this owner for as long as a stage works on a request that is named "poison"."""
    here = threading.local()
    work = Stage.work

    def working(stage: Stage[Any], item: Any) -> None:
        before, here.poisoned = getattr(here, "poisoned", False), "poison" in stage._source(item)[1]
        try:
            work(stage, item)
        finally:
            here.poisoned = before

    def break_(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def broken_for_some(*args: Any, **kwargs: Any) -> Any:
            return (raising if getattr(here, "poisoned", False) else whole)(*args, **kwargs)

        monkeypatch.setattr(owner, name, broken_for_some)

    monkeypatch.setattr(Stage, "work", working)
    return break_


@pytest.fixture
def ended() -> Queue[str]:
    """The ids of the requests that have ended, as they end."""
    return Queue()


@pytest.fixture
def served(ended: Queue[str]) -> Iterator[oDriver]:
    """A driver, none of whose threads has died by the end."""
    failures: list[str] = []
    running = oDriver(FakeEngine(max_model_len=10_000), FakeTokenizer(), on_failure=failures.append)
    running.observe(lambda request, last: ended.put(request.request_id))
    running.start()
    yield running
    running.stop("the test is over")
    assert failures == []


def ask(served: oDriver, name: str, *, client: str = "", **fields: Any) -> Listener:
    """A request that goes by every function."""
    channel = Listener()
    params = {"max_tokens": 30, "stop": ["zz"], "timeout_s": 1000.0, "queue_timeout_s": 1000.0} | fields.pop(
        "params", {}
    )
    question = {"prompt": "abc"} | fields
    request = ActiveRequest(request_id=name, channel=channel, params=params, client=client or name, **question)
    served.submit_request(request)
    return channel


def text_of(channel: Listener) -> str:
    """What came, to its end by length."""
    samples = list(channel)
    assert samples[-1].finish_reason == "length"
    return "".join(sample.text for sample in samples)


CHAT_TEMPLATE = {"prompt": None, "messages": [{"role": "user", "content": "x"}]}
GRAMMAR = {"params": {"structured_outputs": {"choice": ["a"]}}}


@pytest.mark.parametrize(
    ("owner", "name", "fields"),
    [
        (driver.prepare_inputs, "sampling_params", {}),
        (FakeTokenizer, "encode", {}),
        (FakeTokenizer, "encode_word", {"params": {"bad_words": ["x"]}}),
        (FakeTokenizer, "render", CHAT_TEMPLATE),
        (PrepareInputs, "_salt", {}),
        (driver.prepare_inputs, "Sequence", {}),
        (driver.prepare_inputs, "resume", {}),
        (GrammarCompiler, "job", GRAMMAR),
        (GrammarCompiler, "find", GRAMMAR),
        (GrammarCompiler, "compile", GRAMMAR),
        (FakeEngine, "add", {}),
        (FakeEngine, "add", {"params": {"n": 3}}),
        (Deadlines, "add", {}),
        (driver.process_summary, "_Reply", {}),
        (SampleText, "read", {}),
        (Detokenizer, "add", {}),
        (Detokenizer, "flush", {}),
        (FakeTokenizer, "decode", {}),
        (StopStrings, "add", {}),
        (StopStrings, "flush", {}),
        (SampleLogprobs, "of_output", {}),
        (SampleLogprobs, "of_prompt", {"params": {"n": 2}}),
        (SampleTimes, "add_tokens", {}),
        (SampleTimes, "finish", {}),
        (ReturnSample, "__init__", {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)
def test_a_request_that_raises_in_a_stage_ends_alone(
    broken: Break, served: oDriver, owner: Any, name: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It hears "internal", the log has the traceback with its id; who is beside it and after it hears all there is."""
    if owner is ReturnSample:
        owner, name = driver.process_summary, "ReturnSample"
    broken(owner, name)

    beside = ask(served, "beside", params={"max_tokens": 3000})
    poison = ask(served, "poison", **fields)
    code, message = error_of(poison)
    after = ask(served, "after")

    assert code == "internal" and BUG not in message
    assert text_of(beside) == "abc" * 1000
    assert text_of(after) == "abc" * 10
    assert ask(served, "poison", client="someone") is not None  # the id is free again
    assert any(BUG in (record.exc_text or "") and "poison" in record.request_id for record in caplog.records)


def test_an_abort_that_raises_ends_its_request(broken: Break, served: oDriver) -> None:
    """By "internal" instead of "abort"."""
    broken(FakeEngine, "finish")
    poison = ask(served, "poison", params={"max_tokens": 9000})
    next(iter(poison))

    served.abort("poison")

    assert error_of(poison)[0] == "internal"
    assert text_of(ask(served, "after")) == "abc" * 10


def test_a_deadline_that_raises_ends_its_request(broken: Break, served: oDriver) -> None:
    """By "internal" instead of "timeout"."""
    broken(FakeEngine, "finish")

    poison = ask(served, "poison", params={"max_tokens": 9000, "timeout_s": 1e-3})

    assert error_of(poison)[0] == "internal"
    assert text_of(ask(served, "after")) == "abc" * 10


@pytest.mark.parametrize("name", ["prompt", "messages", "token_ids"])
def test_a_tokenizer_request_that_raises_ends_alone(broken: Break, served: oDriver, name: str) -> None:
    """As one for a text does."""
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "token_ids": [1]}[name]
    broken(FakeTokenizer, {"prompt": "encode", "messages": "render", "token_ids": "decode"}[name])
    poison, after = Listener(), Listener()

    served.submit_tokenizer_request(TokenizerRequest(request_id="poison", channel=poison, **{name: asked}))
    served.submit_tokenizer_request(TokenizerRequest(request_id="after", channel=after, **{name: asked}))

    assert error_of(poison)[0] == "internal"
    assert next(iter(after)).error is None


@pytest.mark.parametrize("fails_from", [0, 1])
def test_a_channel_that_raises_ends_its_request(served: oDriver, ended: Queue[str], fails_from: int) -> None:
    """From the first sample on, or later: whoever cannot be told keeps nobody else from being told."""

    class Raising:
        def __init__(self) -> None:
            self.count = 0

        def put(self, sample: ReturnSample) -> None:
            del sample
            self.count += 1
            if self.count > fails_from:
                raise OSError("nobody hears")

    for name in ("poison", "invalid"):
        params = {"max_tokens": 30} if name == "poison" else {"no_such": 1}
        served.submit_request(ActiveRequest(request_id=name, channel=Raising(), prompt="abc", params=params))
    served.submit_tokenizer_request(TokenizerRequest(request_id="t", channel=Raising(), prompt="x"))
    served.operations.profile("profile", None, Raising())

    assert text_of(ask(served, "after")) == "abc" * 10
    assert {ended.get(timeout=PATIENCE) for _ in range(3)} == {"poison", "invalid", "after"}
    assert served.status().open_requests == 0


def test_a_log_that_raises_keeps_no_end_from_its_client(broken: Break, served: oDriver) -> None:
    """The last sample is delivered, and the id is free."""
    broken(RequestLog, "ended")

    assert text_of(ask(served, "poison")) == "abc" * 10
    assert text_of(ask(served, "poison")) == "abc" * 10


def test_a_request_that_raises_while_it_is_submitted_is_not_open(
    served: oDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller hears the exception, and the id is free."""
    with monkeypatch.context() as patch, pytest.raises(LookupError):
        patch.setattr(PrepareInputs, "submit", lambda self, request: {}[request])
        ask(served, "poison")

    assert text_of(ask(served, "poison")) == "abc" * 10


def test_a_stage_that_fails_everybody_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request after request of several clients, with none that goes well: the driver ends, and says so."""
    monkeypatch.setattr(PrepareInputs, "_salt", lambda *_: {}[BUG])
    failures: Queue[str] = Queue()
    running = oDriver(FakeEngine(), FakeTokenizer(), on_failure=failures.put)
    channels = [ask(running, str(number), client=f"client {number % 3}") for number in range(2 * MAX_FAILURES)]

    running.start()

    assert {error_of(channel)[0] for channel in channels} == {"internal"}
    assert failures.get(timeout=PATIENCE).startswith("the prepare inputs thread died of KeyError")
    running.stop("the test is over")
    assert failures.empty()


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (FakeDriver, "submit_request", Generate("poison", prompt="x")),
        (FakeDriver, "submit_tokenizer_request", Tokenize("poison", prompt="x")),
        (FakeDriver, "submit_tokenizer_request", Detokenize("poison", token_ids=[1])),
        (ipc.server.work.client_table, "TokenizerInfoReply", TokenizerInfo("poison")),
        (ipc.server.work.requests, "ActiveRequest", Generate("poison", prompt="x")),
        (ipc.server.work.client_table, "Reply", Generate("poison", prompt="x")),
        (SampleStream, "put", Generate("poison", prompt="x")),
        (ipc.server.work.stream, "_message", Generate("poison", prompt="x")),
        (ipc.server.work.stream, "joined", Generate("poison", prompt="x")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)
def test_a_message_that_raises_ends_its_request(
    broken: Break, address: str, owner: Any, name: str, message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client hears "internal" and goes on to ask, as others do."""
    broken(owner, name)
    with serving(address, FakeDriver()), RawClient(address) as client, RawClient(address) as other:
        client.greet()
        other.greet()
        error = client.ask(message)
        others = [asker.ask(Generate("after", prompt="x")) for asker in (client, other)]

    assert isinstance(error, Error) and (error.request_id, error.code) == ("poison", "internal")
    assert BUG not in error.message and BUG in caplog.text
    assert [type(answer) for answer in others] == [Done, Done]


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (FakeDriver, "abort", Abort("poison")),
        (SampleStream, "grant", Credit("poison", 1)),
        (Delivery, "offer", Credit("poison", 1)),
    ],
)
def test_what_a_client_says_of_an_open_request_may_raise(
    broken: Break, address: str, owner: Any, name: str, message: Any
) -> None:
    """The request ends; its id may be used again."""
    driver_ = FakeDriver()
    with serving(address, driver_), RawClient(address) as client:
        client.greet()
        client.say(Generate("poison", prompt="hold"))
        driver_.take()
        broken(owner, name)
        error = client.ask(message)
        after = client.ask(Generate("after", prompt="x"))

    assert isinstance(error, Error) and (error.request_id, error.code) == ("poison", "internal")
    assert isinstance(after, Done)


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (FakeDriver, "status", Status("poison")),
        (Control, "_answer", Metrics("poison")),
        (Control, "_status", Status("poison")),
    ],
)
def test_a_command_that_raises_is_answered(broken: Break, address: str, owner: Any, name: str, message: Any) -> None:
    """The control socket goes on."""
    broken(owner, name)
    with serving(address, FakeDriver()), RawClient(control_address(address)) as client:
        error = client.ask(message)
        after = client.ask(Status("after"))

    assert isinstance(error, Error) and (error.request_id, error.code) == ("poison", "internal")
    assert not isinstance(after, Error)


@pytest.fixture
def parrot(address: str) -> Iterator[FakeDriver]:
    """What a daemon serves."""
    with serving(address, driver := FakeDriver()):
        yield driver


@pytest.fixture
def http(parrot: FakeDriver, address: str) -> Iterator[httpx.Client]:
    """A client of a gateway in front of that daemon."""
    del parrot
    with gateway(address) as client:
        yield client


def raising(*args: Any, **kwargs: Any) -> Any:
    """Raises whatever it is called with."""
    raise LookupError(BUG, args, kwargs)


@pytest.mark.parametrize("name", ["read", "daemon_for", "ask", "gathered", "text_completion", "_joined", "json_answer"])
def test_a_handler_that_raises_is_a_clean_500(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In OpenAI's shape, without what was raised, which the log has; the next, by the same connection, is served."""
    with monkeypatch.context() as patch:
        patch.setattr(ipc.gateway.endpoints.completions, name, raising)
        answer = http.post(TEXT, json={"prompt": "x"}, headers={"X-Request-Id": "poison"})

    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "poison")
    assert answer.json()["error"]["code"] == "internal" and BUG not in answer.text
    assert BUG in caplog.text and "request poison failed" in caplog.text
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "owner"),
    [
        (TEXT, {"prompt": [1]}, TextChunks),
        (TEXT, {"prompt": [[1], [2]]}, TextChunks),
        (CHAT, chat("hold"), ChatChunks),
    ],
    ids=["a text", "texts", "a chat"],
)
def test_a_stream_that_raises_ends_with_an_error(
    http: httpx.Client, parrot: FakeDriver, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], owner: Any
) -> None:
    """As an event, in OpenAI's shape and without what was raised, and not with a connection that is cut."""
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(lambda: parrot.say(request := parrot.take(), "a", [1]) or request)
        with http.stream("POST", path, json={**body, "stream": True}) as answer:
            monkeypatch.setattr(owner, "take", raising)
            parrot.finish(begun.result())
            told = events(answer)

    assert told[-1]["error"]["code"] == "internal" and BUG not in str(told)
    monkeypatch.undo()
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 200
