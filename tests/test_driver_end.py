"""How the driver ends: by stop, or by the death of one of its threads. Every open request hears why."""

import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine, FakeTokenizer
from test_driver import Listener, build_driver, error_of, submit

from driver.adapters.commands import LoadAdapter
from driver.errors import DriverStopped
from driver.odriver import oDriver
from driver.owed_answers import OwedAnswers
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest
from engine.hub.roots import Root
from engine.live.weight_source import WeightFiles

ENDLESS = 10**9
"""A context that no request fills while a test lasts."""


class Broken(BaseException):
    """What no request's content brings about."""


class FaultyTokenizer(FakeTokenizer):
    """Breaks, by our fault, at a word."""

    def encode(self, text: str) -> list[int]:
        if text == "break encode":
            raise Broken("cannot encode")
        return super().encode(text)

    def definition(self) -> str:
        raise Broken("cannot define")

    def decode(self, token_ids: Tokens[int], *, skip_special_tokens: bool = True) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        if text.endswith("break decode"):
            raise Broken("cannot decode")
        return text


class HeldChannel(Listener):
    """A channel that breaks its promise not to block, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.let_go = threading.Event(), threading.Event()

    def put(self, sample: ReturnSample) -> None:
        self.reached.set()
        self.let_go.wait(timeout=PATIENCE)
        super().put(sample)


def test_stop_tells_every_open_request_why() -> None:
    """Running, waiting and not yet admitted requests all end with code stopped and the operator's reason."""
    with build_driver(FakeEngine(max_num_seqs=1, max_model_len=ENDLESS)) as driver:
        channels = [submit(driver, str(n), params={}) for n in range(10)]
        next(iter(channels[0]))
        driver.stop("the machine goes down")

        assert [error_of(channel) for channel in channels] == [("stopped", "the machine goes down")] * 10
        assert driver.status().open_requests == 0


def test_after_stop_requests_are_refused_with_the_reason() -> None:
    """A stopped driver raises DriverStopped with the reason, ignores aborts, and still tells its status."""
    with build_driver() as driver:
        driver.stop("the machine goes down")
        driver.stop("a second time")

        with pytest.raises(DriverStopped, match="the machine goes down"):
            submit(driver)
        driver.abort("a")
        assert driver.status().open_requests == 0


def test_a_driver_that_never_started_can_be_stopped() -> None:
    """Requests submitted before the start are told, too."""
    driver = oDriver(FakeEngine(), FakeTokenizer())
    channel = submit(driver)

    driver.stop("never mind")

    assert error_of(channel) == ("stopped", "never mind")


def test_stop_under_load_does_not_deadlock() -> None:
    """With the summary queue full and the execution thread waiting in it, stop still ends and tells everybody."""
    driver = oDriver(FakeEngine(max_model_len=ENDLESS), FakeTokenizer())
    driver.start()
    held = HeldChannel()
    driver.submit_request(ActiveRequest(request_id="held", channel=held, prompt="abc"))
    assert held.reached.wait(timeout=PATIENCE)
    others = [submit(driver, str(n), params={}) for n in range(20)]

    stopper = threading.Thread(target=driver.stop, args=["enough"])
    stopper.start()
    held.let_go.set()
    stopper.join(timeout=PATIENCE)

    assert not stopper.is_alive()
    assert {error_of(channel) for channel in (held, *others)} == {("stopped", "enough")}


def test_stop_from_many_threads_is_one_stop() -> None:
    """All calls of stop return once everything is over, and every request hears one reason, once."""
    driver = oDriver(FakeEngine(max_model_len=ENDLESS), FakeTokenizer())
    driver.start()
    channels = [submit(driver, str(n), params={}) for n in range(5)]

    stoppers = [threading.Thread(target=driver.stop, args=[f"reason {n}"]) for n in range(8)]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join(timeout=PATIENCE)

    assert not any(stopper.is_alive() for stopper in stoppers)
    assert len({error_of(channel) for channel in channels}) == 1


def test_a_step_that_hangs_does_not_keep_stop_from_telling(caplog: pytest.LogCaptureFixture) -> None:
    """Past its timeout stop leaves a hanging thread behind, says so, and nothing of it reaches a client any more."""
    gate = threading.Semaphore(3)
    driver = oDriver(FakeEngine(gate=gate), FakeTokenizer())
    driver.start()
    channel = submit(driver)
    samples = iter(channel)
    next(samples)

    driver.stop("enough", timeout=0.05)
    gate.release(100)

    assert [sample.error is not None for sample in samples][-1]
    assert "thread execution loop still runs" in caplog.text


def test_a_thread_that_was_left_behind_gives_no_second_end() -> None:
    """A request that stop has told is not told again by a stage that hung meanwhile and now finds fault with it."""
    asked, let_go = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class HangingTokenizer(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            asked.set()
            let_go.wait(timeout=PATIENCE)
            return super().encode(text)[:0]

    driver = oDriver(FakeEngine(), HangingTokenizer())
    driver.start()
    told: queue.SimpleQueue[ReturnSample] = queue.SimpleQueue()
    driver.submit_request(ActiveRequest(request_id="a", channel=told, prompt="x"))
    assert asked.wait(timeout=PATIENCE)

    driver.stop("enough", timeout=0)
    let_go.set()
    threads[0].join(timeout=PATIENCE)

    assert told.get().error is not None
    assert told.empty()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"prompt": "break encode"}, "the prepare inputs thread died of Broken: cannot encode"),
        ({"choice": ["a"]}, "the compile grammars thread died of Broken: cannot define"),
        ({"fails_at": 3}, "the execution loop thread died of RuntimeError: the device is on fire"),
        ({"prompt": "break decode"}, "the process summary thread died of Broken: cannot decode"),
    ],
    ids=["prepare inputs", "compile grammars", "execution loop", "process summary"],
)
def test_a_dead_thread_stops_the_driver_and_everybody_hears_why(
    fault: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever thread dies, every open request hears code internal and the cause, on_failure hears it once, and no
    new work is taken."""
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = FakeEngine(max_model_len=ENDLESS, fails_at=fault.get("fails_at"))
    driver = oDriver(engine, FaultyTokenizer(), on_failure=failures.put)
    prompts = [fault.get("prompt", "abc"), "abc", "abc", "abc"]
    channels = [submit(driver, str(n), prompt, params={}) for n, prompt in enumerate(prompts)]
    if "choice" in fault:
        channels.append(submit(driver, "form", params={"structured_outputs": {"choice": fault["choice"]}}))

    driver.start()

    assert failures.get(timeout=PATIENCE) == reason
    assert {error_of(channel) for channel in channels} == {("internal", reason)}
    with pytest.raises(DriverStopped, match="died of"):
        submit(driver, "late")
    driver.stop("the daemon goes on to exit")
    assert failures.empty() and "died" in caplog.text


def test_a_failure_may_be_answered_with_stop() -> None:
    """on_failure may call stop, on the dying thread, without waiting for itself."""
    answered = threading.Event()

    def on_failure(reason: str) -> None:
        driver.stop(reason)
        answered.set()

    driver = oDriver(FakeEngine(fails_at=1), FakeTokenizer(), on_failure=on_failure)
    driver.start()
    channel = submit(driver)

    assert answered.wait(timeout=PATIENCE)
    assert error_of(channel)[0] == "internal"


class HangingTokenizer(FakeTokenizer):
    """Every text hangs until it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.asked.set()
        assert self.let_go.wait(timeout=PATIENCE)
        return super().encode(text)


class OneAnswer(Listener):
    """A channel that must get one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[ReturnSample] = []

    def put(self, sample: ReturnSample) -> None:
        self.samples.append(sample)
        super().put(sample)


@pytest.fixture
def hanging() -> Iterator[HangingTokenizer]:
    """One that lets go at the end."""
    tokenizer = HangingTokenizer()
    yield tokenizer
    tokenizer.let_go.set()


def ask_tokenizer(driver: oDriver, request_id: str) -> OneAnswer:
    """Submits a text of the tokenizer's; its channel."""
    channel = OneAnswer()
    driver.submit_tokenizer_request(TokenizerRequest(request_id=request_id, channel=channel, prompt="x"))
    return channel


@pytest.mark.parametrize(("end", "code"), [(oDriver.stop, "stopped"), (oDriver.fail, "internal")], ids=["stop", "fail"])
def test_who_asks_the_tokenizer_hears_of_the_end(
    hanging: HangingTokenizer, end: Callable[[oDriver, str, float], None], code: str
) -> None:
    """Queued, or with a thread that hangs and whose late answer is dropped; an abort in the queue has its own end."""
    driver = oDriver(FakeEngine(), hanging)
    driver.start()
    in_hand = ask_tokenizer(driver, "in hand")
    assert hanging.asked.wait(timeout=PATIENCE)
    queued, aborted = ask_tokenizer(driver, "queued"), ask_tokenizer(driver, "aborted")
    assert driver.abort("aborted") and not driver.abort("in hand")

    end(driver, "enough", 0.05)
    hanging.let_go.set()
    for thread in driver._threads:
        assert thread.join(timeout=PATIENCE)

    assert [error_of(channel) for channel in (in_hand, queued)] == [(code, "enough")] * 2
    assert [sample.finish_reason for sample in aborted.samples] == ["abort"]
    assert not driver.abort("queued")
    assert [len(channel.samples) for channel in (in_hand, queued, aborted)] == [1, 1, 1]
    with pytest.raises(DriverStopped, match="enough"):
        ask_tokenizer(driver, "late")


def test_who_asks_the_tokenizer_hears_of_a_dead_thread() -> None:
    """The one whose text ends the thread, and those behind it."""
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    driver = oDriver(FakeEngine(), FaultyTokenizer(), on_failure=failures.put)
    poison, behind = OneAnswer(), []
    driver.submit_tokenizer_request(TokenizerRequest(request_id="p", channel=poison, prompt="break encode"))
    behind = [ask_tokenizer(driver, str(n)) for n in range(3)]

    driver.start()

    reason = failures.get(timeout=PATIENCE)
    assert {error_of(channel) for channel in (poison, *behind)} == {("internal", reason)}


def test_commands_without_an_answer_hear_of_the_end(tmp_path: Path) -> None:
    """Whatever they are, and in whichever queue: here no thread has begun."""
    driver = oDriver(FakeEngine(), FakeTokenizer(), max_cpu_loras=1, adapter_root=Root(str(tmp_path), "adapter_root"))
    commands: dict[str, Callable[[OneAnswer], None]] = {
        "sleep": lambda channel: driver.operations.sleep("sleep", channel),
        "wake": lambda channel: driver.operations.wake("wake", channel),
        "pause": lambda channel: driver.operations.pause("pause", channel, "wait", clear_cache=False),
        "resume": lambda channel: driver.operations.resume("resume", channel),
        "update": lambda channel: driver.operations.update_weights("update", channel, WeightFiles("new")),
        "cache": lambda channel: driver.operations.reset_prefix_cache("cache", channel),
        "profile": lambda channel: driver.operations.profile("profile", None, channel),
        "load": lambda channel: driver.operations.command_adapters(LoadAdapter("load", channel, "a")),
    }
    channels = {name: OneAnswer() for name in commands}
    for name, command in commands.items():
        command(channels[name])

    driver.stop("enough")

    assert {name: error_of(channel) for name, channel in channels.items()} == dict.fromkeys(
        commands, ("stopped", "enough")
    )
    for command in commands.values():
        with pytest.raises(DriverStopped, match="enough"):
            command(OneAnswer())


def test_the_end_meets_questions_from_many_threads() -> None:
    """Whenever the driver ends, each that it has taken gets one answer, and one that it refuses none."""
    for _ in range(30):
        driver = oDriver(FakeEngine(), FakeTokenizer(), max_queued_requests=100_000)
        driver.start()
        taken: list[OneAnswer] = []
        refused: list[OneAnswer] = []
        begun = threading.Semaphore(0)

        def ask(client: str, driver: oDriver = driver, taken: list[OneAnswer] = taken) -> None:
            with suppress(DriverStopped):
                for number in range(100_000):
                    channel = OneAnswer()
                    request = TokenizerRequest(
                        request_id=f"{client}{number}", channel=channel, prompt="x", client=client
                    )
                    refused.append(channel)  # noqa: B023
                    driver.submit_tokenizer_request(request)
                    refused.remove(channel)  # noqa: B023
                    taken.append(channel)
                    begun.release()  # noqa: B023

        threads = [threading.Thread(target=ask, args=[name]) for name in "abc"]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=PATIENCE)
        driver.stop("enough")
        for thread in threads:
            thread.join(timeout=PATIENCE)

        assert {len(channel.samples) for channel in taken} == {1}
        assert [channel.samples for channel in refused] == [[]] * 3


def test_an_exception_is_dropped_where_the_answer_was_given_meanwhile() -> None:
    """A submission that finds its queue closed after all were told does not tell a second time; nor does a channel
    that raises keep others from being told."""

    class Raising(OneAnswer):
        def put(self, sample: ReturnSample) -> None:
            super().put(sample)
            raise OSError("nobody hears")

    owed, channels = OwedAnswers(), [Raising(), Raising()]

    for channel in channels:
        with owed.owing("a", channel):
            if channel is channels[1]:
                owed.close(DriverStopped("enough"))
                owed.fail_all(DriverStopped("enough"))
                raise ZeroDivisionError

    assert [error_of(channel) for channel in channels] == [("stopped", "enough")] * 2
    with pytest.raises(DriverStopped, match="enough"), owed.owing("b", OneAnswer()):
        pytest.fail("it takes no more")


def test_an_end_while_weights_are_staged_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """They are ready when the execution thread has ended, and will never be written."""
    staging, let_go = threading.Event(), threading.Event()

    class StagingEngine(FakeEngine):
        def stage_weights(self, source: Any) -> Any:
            staging.set()
            assert let_go.wait(timeout=PATIENCE)
            return super().stage_weights(source)

    driver = oDriver(StagingEngine(), FakeTokenizer())
    driver.start()
    driver.operations.update_weights("u", channel := OneAnswer(), WeightFiles("new"))
    assert staging.wait(timeout=PATIENCE)

    stopper = threading.Thread(target=driver.stop, args=["enough", 5.0])
    stopper.start()
    for thread in driver._threads:
        if thread.name == "execution loop":
            assert thread.join(timeout=PATIENCE)
    let_go.set()
    stopper.join(timeout=PATIENCE)

    assert error_of(channel) == ("stopped", "enough") and "still runs" not in caplog.text
