"""Aborts, at every moment of a request's life."""

import threading

import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine, FakeTokenizer
from test_driver import build_driver, submit, text_of

from driver.errors import DuplicateRequest
from driver.odriver import oDriver
from driver.request import QueueChannel, Usage
from engine.scheduling.sequence import SequenceStatus


class HeldTokenizer(FakeTokenizer):
    """Encodes once it is let go; says when somebody asks."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.asked.set()
        self.let_go.wait(timeout=PATIENCE)
        return super().encode(text)


def test_a_running_request_is_aborted_in_mid_sentence() -> None:
    """The last sample has reason abort and counts the tokens that were delivered; the engine has let go."""
    gate = threading.Semaphore(4)
    engine = FakeEngine(gate=gate)

    with build_driver(engine) as driver:
        samples = iter(submit(driver, params={"max_tokens": 100}))
        first = [next(samples) for _ in range(3)]
        driver.abort("a")
        gate.release(100)
        rest = list(samples)
        status = driver.status()

    assert text_of(first + rest) == "abc" + "".join(sample.text for sample in rest)
    assert rest[-1].finish_reason == "abort"
    assert rest[-1].usage == Usage(3, sum(len(sample.token_ids) for sample in first + rest))
    assert engine.admitted[0].status is SequenceStatus.FINISHED and status.running == 0


def test_a_waiting_request_is_aborted_without_a_token() -> None:
    """A request that waits for a slot ends at once, and the one that has the slot goes on."""
    gate = threading.Semaphore(1)

    with build_driver(FakeEngine(gate=gate, max_num_seqs=1)) as driver:
        running, waiting = submit(driver, "a"), submit(driver, "b")
        driver.abort("b")
        gate.release(100)
        samples = list(waiting)

        assert text_of(list(running)) == "abcab"
    assert [(sample.finish_reason, sample.token_ids) for sample in samples] == [("abort", [])]


def test_a_request_that_is_being_prepared_is_aborted() -> None:
    """An abort that reaches the execution thread before the admission does is not lost."""
    tokenizer = HeldTokenizer()
    engine = FakeEngine()
    driver = oDriver(engine, tokenizer)
    driver.start()

    channel = submit(driver)
    assert tokenizer.asked.wait(timeout=PATIENCE)
    driver.abort("a")
    tokenizer.let_go.set()
    samples = list(channel)
    driver.stop("the test is over")

    assert [(sample.finish_reason, sample.usage) for sample in samples] == [("abort", Usage(3, 0))]
    assert engine.steps == 0


def test_an_abort_that_is_repeated_is_heard_once() -> None:
    """While its request is prepared a client may say it thousands of times: the execution thread has other things to do."""
    tokenizer, engine = HeldTokenizer(), FakeEngine()
    heard = []
    engine.finish = lambda sequence_id: bool(heard.append(sequence_id))  # type: ignore[method-assign]
    driver = oDriver(engine, tokenizer)
    driver.start()

    submit(driver)
    assert tokenizer.asked.wait(timeout=PATIENCE)
    assert all(driver.abort("a") for _ in range(1000))
    driver.operations.reset_prefix_cache("later", channel := QueueChannel())
    assert list(channel)[-1].error is None
    tokenizer.let_go.set()
    driver.stop("the test is over")

    assert len(heard) < 4


def test_a_request_that_is_queued_is_aborted() -> None:
    """A request that waits to be prepared is aborted without being read."""
    tokenizer = HeldTokenizer()
    driver = oDriver(FakeEngine(), tokenizer)
    driver.start()

    first = submit(driver, "a")
    assert tokenizer.asked.wait(timeout=PATIENCE)
    second = submit(driver, "b")
    driver.abort("b")
    tokenizer.let_go.set()

    assert text_of(list(first)) == "abcab"
    assert [(sample.finish_reason, sample.usage) for sample in second] == [("abort", Usage(0, 0))]
    driver.stop("the test is over")


@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_of_nothing_is_ignored(times: int) -> None:
    """Unknown ids, ended requests and second aborts change nothing."""
    with build_driver() as driver:
        channel = submit(driver)
        ended = text_of(list(channel))
        for request_id in ("a", "unknown") * times:
            driver.abort(request_id)

        assert ended == text_of(list(submit(driver, "a"))) == "abcab"


def test_two_aborts_make_one_end() -> None:
    """A request aborted twice in its midst hears of it once."""
    gate = threading.Semaphore(0)

    with build_driver(FakeEngine(gate=gate)) as driver:
        channel = submit(driver, params={"max_tokens": 100})
        driver.abort("a")
        driver.abort("a")
        gate.release(100)

        assert text_of(samples := list(channel)) == "".join(sample.text for sample in samples)
        assert text_of(list(submit(driver, "a"))) == "abcab"


def test_a_late_token_does_not_reach_the_next_request_of_the_same_id() -> None:
    """A token in flight when its request was aborted is dropped, though a new request has its id by then."""
    gate = threading.Semaphore(3)

    with build_driver(FakeEngine(gate=gate)) as driver:
        old = iter(submit(driver, prompt="old", params={"max_tokens": 100}))
        assert next(old).text == "o"
        driver.abort("a")
        gate.release(1)
        assert [sample.finish_reason for sample in old][-1] == "abort"
        new = submit(driver, prompt="new")
        gate.release(100)

        assert text_of(list(new)) == "newne"


def test_the_id_of_an_aborted_request_is_free_before_its_end() -> None:
    """Who has turned away from a request may use its id at once; each of the two ends once, and an abort is of the later."""
    tokenizer = HeldTokenizer()
    driver = oDriver(FakeEngine(), tokenizer)
    driver.start()

    old = submit(driver)
    assert tokenizer.asked.wait(timeout=PATIENCE)
    driver.abort("a")
    new = submit(driver)
    with pytest.raises(DuplicateRequest):
        submit(driver)
    num_open = driver.status().open_requests
    tokenizer.let_go.set()

    assert [sample.finish_reason for sample in old] == ["abort"]
    assert text_of(list(new)) == "abcab"
    assert num_open == 2 and driver.status().open_requests == 0
    assert not driver.abort("a") and text_of(list(submit(driver))) == "abcab"
    driver.stop("the test is over")
