"""The whole driver, real threads and queues, on an engine that repeats the prompt: to the exact token."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from fake_driver import PATIENCE
from fakes import EOS, VOCAB_SIZE, FakeEngine, FakeTokenizer

from driver.errors import DriverStopped, DuplicateRequest, Overloaded
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample, Usage
from engine.errors import ConfigurationError
from engine.request_limits import MOST_EOS_TOKEN_IDS
from engine.scheduling.sequence import SequenceStatus


class Listener:
    """A channel to iterate over that fails, rather than waits for ever, when a last sample never comes."""

    def __init__(self) -> None:
        self._samples: queue.SimpleQueue[ReturnSample] = queue.SimpleQueue()

    def put(self, sample: ReturnSample) -> None:
        self._samples.put(sample)

    def __iter__(self) -> Iterator[ReturnSample]:
        while True:
            sample = self._samples.get(timeout=PATIENCE)
            yield sample
            if sample.is_last:
                return


@contextmanager
def build_driver(
    engine: FakeEngine | None = None, tokenizer: FakeTokenizer | None = None, **options: Any
) -> Iterator[oDriver]:
    """A started driver, stopped at the end."""
    driver = oDriver(engine or FakeEngine(), tokenizer or FakeTokenizer(), **options)
    driver.start()
    try:
        yield driver
    finally:
        driver.stop("the test is over")


def submit(driver: oDriver, request_id: str = "a", prompt: Any = "abc", **fields: Any) -> Listener:
    """Submits a request; its channel. ``params`` default to five tokens."""
    channel = Listener()
    prompt = None if "messages" in fields else prompt
    fields.setdefault("params", {"max_tokens": 5})
    driver.submit_request(ActiveRequest(request_id=request_id, channel=channel, prompt=prompt, **fields))
    return channel


def text_of(samples: list[ReturnSample]) -> str:
    """The whole text, after checking that exactly the last sample says that it is the last."""
    assert [sample.is_last for sample in samples] == [False] * (len(samples) - 1) + [True]
    return "".join(sample.text for sample in samples)


def error_of(channel: Listener) -> tuple[str, str]:
    """Code and message of the error that a request ended with."""
    error = list(channel)[-1].error
    assert error is not None
    return error.code, error.message


def test_a_prompt_becomes_text_to_the_exact_token() -> None:
    """A request gets its tokens one by one, then its reason and its usage."""
    with build_driver() as driver:
        samples = list(submit(driver, prompt="ab", params={"max_tokens": 3}))

    assert samples == [
        ReturnSample(request_id="a", text="a", token_ids=[97]),
        ReturnSample(request_id="a", text="b", token_ids=[98]),
        ReturnSample(request_id="a", text="a", token_ids=[97], finish_reason="length", usage=Usage(2, 3)),
    ]


def test_many_at_once_get_what_each_gets_alone() -> None:
    """Forty requests on four slots each get exactly their own text."""
    prompts = [f"{n} é😀 " for n in range(40)]

    with build_driver() as driver:
        channels = [submit(driver, prompt, prompt, params={"max_tokens": 20}) for prompt in prompts]
        texts = [text_of(list(channel)) for channel in channels]
        status = driver.status()

    assert texts == [(prompt.encode() * 3)[:20].decode(errors="replace") for prompt in prompts]
    assert (status.running, status.waiting, status.open_requests, status.queued_requests) == (0, 0, 0, 0)


def test_a_chat_goes_through_the_template() -> None:
    """Messages are served as the prompt that the template makes of them."""
    with build_driver() as driver:
        channel = submit(driver, messages=[{"role": "user", "content": "2+2?"}], params={"max_tokens": 23})

        assert text_of(list(channel)) == "user: 2+2?\nassistant: u"


def test_an_eos_token_ends_the_text_and_its_late_successor_is_dropped() -> None:
    """EOS ends a request with reason stop; the token that run-ahead computed after it is seen by nobody."""
    with build_driver() as driver:
        samples = list(submit(driver, prompt=[*b"hi", EOS], params={}))

    assert text_of(samples) == "hi"
    assert (samples[-1].finish_reason, samples[-1].usage) == ("stop", Usage(3, 3))


def test_the_tokenizers_end_token_ends_the_text_too() -> None:
    """Many fine-tunes change it and not the model's; with ignore_eos neither ends it."""
    tokenizer = FakeTokenizer()
    tokenizer.eos_token_ids = (ord("!"), VOCAB_SIZE + 7)

    with build_driver(tokenizer=tokenizer) as driver:
        samples = list(submit(driver, prompt="hi! and so on", params={}))
        ignoring = list(submit(driver, "b", prompt="hi!", params={"ignore_eos": True, "max_tokens": 5}))

    assert driver.limits.eos_token_ids == (EOS, ord("!"))
    assert (text_of(samples), samples[-1].finish_reason) == ("hi", "stop")
    assert text_of(ignoring) == "hi!hi"


def test_more_end_tokens_than_can_be_hidden_are_refused() -> None:
    """The model's and the tokenizer's together."""
    engine, tokenizer = FakeEngine(), FakeTokenizer()
    engine.limits = msgspec.structs.replace(engine.limits, eos_token_ids=tuple(range(MOST_EOS_TOKEN_IDS)))
    tokenizer.eos_token_ids = (100,)

    with pytest.raises(ConfigurationError, match="33 end tokens, and 32 are most"):
        oDriver(engine, tokenizer)


def test_a_stop_string_ends_the_text_before_it_and_frees_the_sequence() -> None:
    """Text ends before the stop string, no part of it is ever shown, and the engine ends the sequence."""
    engine = FakeEngine()

    with build_driver(engine) as driver:
        channel = submit(driver, prompt="one END two ", params={"stop": ["two o", "END"], "max_tokens": 200})
        samples = list(channel)
        text_of(list(submit(driver, "b")))

    assert text_of(samples) == "one "
    assert samples[-1].finish_reason == "stop"
    assert engine.admitted[0].status is SequenceStatus.FINISHED and len(engine.admitted[0].output_token_ids) < 200


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x" * 256}, "the prompt has 256 tokens"),
        ({"prompt": [300]}, "prompt[0] must be a token id"),
        ({"params": {"max_token": 1}}, "unknown parameter 'max_token'"),
        ({"params": {"max_tokens": 0}}, "max_tokens must be at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
    ],
)
def test_a_clients_mistake_is_that_clients_alone(fields: dict[str, Any], complaint: str) -> None:
    """A bad request hears what is wrong with it; one that is running gets its text, and so does the next."""
    gate = threading.Semaphore(3)

    with build_driver(FakeEngine(gate=gate)) as driver:
        running = submit(driver, "running")
        code, message = error_of(submit(driver, "bad", **fields))
        gate.release(100)

        too_long = "256 tokens" in complaint
        assert code == ("context_length_exceeded" if too_long else "invalid_request") and complaint in message
        assert text_of(list(running)) == "abcab"
        assert text_of(list(submit(driver, "bad"))) == "abcab"


def test_an_id_in_use_is_refused_and_then_free() -> None:
    """A second request under an open id is refused at once; after the last sample the id can be used again."""
    gate = threading.Semaphore(0)

    with build_driver(FakeEngine(gate=gate)) as driver:
        channel = submit(driver)
        with pytest.raises(DuplicateRequest, match="'a' is in use"):
            submit(driver)
        gate.release(100)

        assert text_of(list(channel)) == "abcab"
        assert text_of(list(submit(driver))) == "abcab"


def test_the_same_request_object_cannot_be_open_twice() -> None:
    """Identity is no way round the check for duplicates."""
    request = ActiveRequest(request_id="a", channel=Listener(), prompt="x")

    with build_driver(FakeEngine(gate=(gate := threading.Semaphore(0)))) as driver:
        driver.submit_request(request)
        with pytest.raises(DuplicateRequest):
            driver.submit_request(request)
        gate.release(1000)


def test_too_many_waiting_requests_are_refused_at_once() -> None:
    """Beyond max_queued_requests that do not run, requests are refused; they are not open, and later they may come."""
    gate = threading.Semaphore(0)

    with build_driver(FakeEngine(gate=gate), max_queued_requests=2) as driver:
        channels = [submit(driver, name) for name in "ab"]
        with pytest.raises(Overloaded, match="2 requests wait already"):
            submit(driver, "c")
        gate.release(100)

        assert [text_of(list(channel)) for channel in channels] == ["abcab"] * 2
        assert text_of(list(submit(driver, "c"))) == "abcab"


def test_who_has_a_token_waits_no_longer() -> None:
    """Beside a request that streams as many may wait as the limit says, and no more."""
    gate = threading.Semaphore(0)

    with build_driver(FakeEngine(gate=gate), max_queued_requests=1) as driver:
        stream = iter(submit(driver, "a"))
        gate.release(2)  # a token lands in the step behind its own
        first = next(stream)
        waiting = submit(driver, "b")
        with pytest.raises(Overloaded, match="1 requests wait already"):
            submit(driver, "c")
        gate.release(100)

        assert text_of([first, *stream]) == "abcab"
        assert text_of(list(waiting)) == "abcab"


def test_two_drivers_share_nothing() -> None:
    """The end of one driver is not noticed by another, nor are its request ids."""
    with build_driver() as first, build_driver() as second:
        first.stop("enough")

        assert text_of(list(submit(second))) == "abcab"
        with pytest.raises(DriverStopped):
            submit(first)


def test_status_counts_what_is_open() -> None:
    """Status tells the engine's numbers and the driver's own."""
    gate = threading.Semaphore(0)

    with build_driver(FakeEngine(gate=gate, max_num_seqs=1)) as driver:
        channels = [submit(driver, name) for name in "ab"]
        assert driver.status().open_requests == 2
        gate.release(100)
        for channel in channels:
            text_of(list(channel))
        status = driver.status()

    assert (status.open_requests, status.running, status.uptime_seconds > 0) == (0, 0, True)
    assert status.steps > 10
    assert driver.status().seconds_since_progress == 0


def test_who_hears_that_the_prefix_cache_is_empty_finds_it_so_in_the_status() -> None:
    """At once: the status is of the moment after."""
    engine = FakeEngine()
    engine.num_kept_pages = 3
    seen: list[int] = []

    class Asking(Listener):
        def put(self, sample: ReturnSample) -> None:
            seen.append(driver.status().pages_cached)
            super().put(sample)

    with build_driver(engine) as driver:
        driver.operations.reset_prefix_cache("r", channel := Asking())

        assert list(channel)[-1].error is None
    assert seen == [0]
