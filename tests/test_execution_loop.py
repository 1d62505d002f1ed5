"""The execution loop waits exactly when the engine is idle, and says things in order."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine

from driver.execution import execution_loop, inbox
from driver.execution.execution_loop import ExecutionLoop
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, QueueChannel
from driver.stages.queues import BoundedQueue
from driver.stages.safe_thread import SafeThread
from driver.thread_messages import (
    AbortSequences,
    Admit,
    Ended,
    Finished,
    Inbound,
    Opened,
    ResumeEngine,
    StepOutputs,
    Stop,
    Summary,
)
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput


class ScriptedInbox:
    """Hands out the messages of a script; None in it means that nothing is there yet. Notes who would have waited."""

    def __init__(self, script: list[Inbound | None]) -> None:
        self.script = script
        self.waits: list[bool] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Inbound:
        assert timeout is None
        self.waits.append(block)
        message = self.script.pop(0) if self.script else Stop()
        if message is None:
            assert not block, "the loop would wait for ever, with work to do"
            raise queue.Empty
        return message


class SlowInbox(ScriptedInbox):
    """Each message takes 1.1 ms of a clock of its own."""

    now = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Inbound:
        self.now += 0.0011
        return super().get(block, timeout)


def build_admit(name: str = "a", prompt: str = "ab", max_tokens: int = 2, **params: Any) -> Admit:
    """An admission of a request that the parrot answers with its own prompt."""
    request = OpenRequest(ActiveRequest(request_id=name, channel=QueueChannel()), sequence_id=name)
    ids = list(prompt.encode())
    sequence = Sequence(name, ids, SamplingParams(**params), frozenset(), max_tokens=max_tokens, seed=0)
    return Admit([sequence], Opened(request, [sequence], ids, len(ids), sequence.params))


def run_script(
    engine: FakeEngine, script: list[Inbound | None], clock: Callable[[], float] = lambda: 0.0
) -> tuple[list[Summary], ScriptedInbox]:
    """Runs the loop on this thread until the script is over; what it said, and the inbox."""
    summaries: BoundedQueue[Summary] = BoundedQueue(100)
    loop: Any = ExecutionLoop(engine, summaries, clock)
    loop.inbox = ScriptedInbox(script)

    loop.run()

    return [summaries.get() for _ in range(len(summaries))], loop.inbox


def test_the_loop_waits_if_and_only_if_the_engine_is_idle() -> None:
    """Idle, it waits in ``get`` and does not step; with work, it takes what is there and steps."""
    engine = FakeEngine()

    _, inbox = run_script(engine, [build_admit(max_tokens=2), None, None, None, Finished("unknown"), None])

    # Waits for the Admit; looks three times for more, with a step after each; then waits for Finished, and for Stop.
    assert inbox.waits == [True, False, False, False, True, False, True]
    assert engine.steps == 3


def test_everything_in_the_inbox_is_heard_before_a_step() -> None:
    """Requests that arrive together start in the same step."""
    engine = FakeEngine()

    said, _ = run_script(engine, [build_admit("a", max_tokens=1), build_admit("b", max_tokens=1), None, None])

    assert said[-1] == StepOutputs([SequenceOutput("a", [97], "length"), SequenceOutput("b", [97], "length")])
    assert engine.steps == 2


def test_who_comes_beside_a_long_step_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sleeps while the engine has time to spare, looks now and then whether it still has, and then hears."""

    class Patient(FakeEngine):
        spare = 0.03

        @property
        def seconds_to_spare(self) -> float:
            return self.spare if self.steps == 1 else 0.0

    engine, slept = Patient(), list[float]()
    loop: Any = ExecutionLoop(engine, BoundedQueue(100), lambda: 0.0)
    loop.inbox = ScriptedInbox([build_admit("a"), None])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        engine.spare -= seconds
        if engine.spare < 1e-9:
            engine.spare = 0.0
            loop.inbox.script += [build_admit("b"), None]

    monkeypatch.setattr(execution_loop.time, "sleep", sleep)
    loop.run()

    assert slept == [execution_loop.LOOKS, pytest.approx(0.03 - execution_loop.LOOKS)]
    assert [sequence.request_id for sequence in engine.admitted] == ["a", "b"]
    assert engine.steps == 2


@pytest.mark.parametrize(
    ("step_seconds", "per_step"),
    [(0.0, 5), (0.04, 8), (1.0, 200)],
    ids=["short steps", "longer ones", "very long ones"],
)
def test_messages_that_come_fast_do_not_keep_steps_from_running(step_seconds: float, per_step: int) -> None:
    """Each takes 1.1 ms: after 5 ms there is a step, or after a fifth of what the step before took, whatever waits."""

    class Timed(FakeEngine):
        def step(self) -> list[SequenceOutput]:
            heard.append(len(messages.waits))
            messages.now += step_seconds
            return super().step()

    messages, heard = SlowInbox([build_admit(max_tokens=99), *[Finished("unknown")] * 600]), list[int]()
    loop: Any = ExecutionLoop(Timed(), BoundedQueue(1000), lambda: messages.now)
    loop.inbox = messages

    loop.run()

    assert heard[1] - heard[0] == heard[2] - heard[1] == pytest.approx(per_step, rel=0.1, abs=1)


def test_a_change_that_took_long_leaves_messages_no_more_time_than_a_step() -> None:
    """Such as new weights: a minute is no reason to handle messages for twelve seconds, as requests wait."""

    def run(_: object) -> None:
        messages.now += 60.0

    engine, messages = FakeEngine(), SlowInbox([Finished("unknown")] * 600)
    loop: Any = ExecutionLoop(engine, BoundedQueue(100), lambda: messages.now)
    engine.add(build_admit().sequences[0])
    loop._changes.run = run
    loop._change(ResumeEngine("r", QueueChannel()))
    loop.inbox = messages

    loop._handle_messages()

    assert len(loop.inbox.waits) == 5


def test_who_prepares_waits_while_enough_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the loop has taken some, or for a while where it takes none."""
    monkeypatch.setattr(inbox, "MOST_AHEAD", 2)
    monkeypatch.setattr(inbox, "AHEAD_PATIENCE", PATIENCE)
    loop = ExecutionLoop(FakeEngine(), BoundedQueue(100))
    admits = [build_admit(str(number)) for number in range(5)]
    preparing = threading.Thread(target=lambda: [loop.inbox.admit(admit) for admit in admits])
    preparing.start()
    heard = []
    while len(heard) < 5:
        assert len(loop.inbox) <= 2
        if len(loop.inbox):
            loop._handle_messages()
            heard = loop._engine.sequence_ids
    preparing.join()

    monkeypatch.setattr(inbox, "AHEAD_PATIENCE", 0.01)
    for admit in admits:
        loop.inbox.admit(admit)
    assert heard == [str(number) for number in range(5)] and len(loop.inbox) == 5


def test_the_opening_of_a_request_precedes_its_tokens() -> None:
    """The summary thread hears Opened, then tokens, a message for each step that landed some."""
    admit = build_admit(prompt="xy", max_tokens=3)

    said, _ = run_script(FakeEngine(), [admit, *[None] * 4])

    assert said[0] is admit.opened
    assert said[1:] == [
        StepOutputs([SequenceOutput("a", [token], end)]) for token, end in [(120, None), (121, None), (120, "length")]
    ]


def test_an_abort_frees_the_sequence_and_follows_its_tokens() -> None:
    """An AbortSequences of a running request reaches the summary thread after the tokens that landed before it."""
    admit = build_admit(max_tokens=50)
    engine = FakeEngine()

    said, _ = run_script(engine, [admit, None, None, AbortSequences(admit.opened.request), None])

    assert said[:3] == [admit.opened, StepOutputs([SequenceOutput("a", [97])]), Ended("a", "abort")]
    assert engine.stats().running == 0 and not engine.has_work


def test_an_abort_that_comes_before_the_admission_still_counts() -> None:
    """The flag set before an early AbortSequences ends the request as soon as it is admitted, without a step."""
    admit = build_admit()
    admit.opened.request.aborted = True
    engine = FakeEngine()

    said, _ = run_script(engine, [AbortSequences(admit.opened.request), admit, AbortSequences(admit.opened.request)])

    assert said == [admit.opened, Ended("a", "abort")]
    assert engine.steps == 0


def test_an_abort_of_an_ended_request_is_nothing() -> None:
    """An AbortSequences that crosses the last token, or comes twice, says nothing."""
    admit = build_admit(max_tokens=1)

    said, _ = run_script(
        FakeEngine(), [admit, None, None, AbortSequences(admit.opened.request), AbortSequences(admit.opened.request)]
    )

    assert said == [admit.opened, StepOutputs([SequenceOutput("a", [97], "length")])]


def test_the_snapshot_is_published_before_what_it_counts() -> None:
    """Whoever hears of a request's end, by length or by abort, finds it no longer running in the snapshot."""
    running: list[tuple[type, int]] = []

    class Witness(BoundedQueue[Summary]):
        def put(self, item: Summary) -> None:
            running.append((type(item), loop.stats.running))

    aborted = build_admit("b", max_tokens=50)
    loop: Any = ExecutionLoop(FakeEngine(), Witness(1), lambda: 0.0)
    loop.inbox = ScriptedInbox(
        [build_admit(max_tokens=1), None, None, aborted, None, AbortSequences(aborted.opened.request)]
    )

    loop.run()

    assert running == [(Opened, 0), (StepOutputs, 0), (Opened, 0), (Ended, 0)]


def test_a_loop_that_waits_for_the_summary_thread_can_be_ended() -> None:
    """Closing a full summary queue ends the loop that waits in it, though nobody ever reads."""
    summaries: BoundedQueue[Summary] = BoundedQueue(1)
    enough_steps = threading.Semaphore(3)
    loop = ExecutionLoop(FakeEngine(gate=enough_steps), summaries)
    thread = SafeThread("loop", loop.run, on_death=lambda *_: None)
    loop.inbox.put(build_admit(max_tokens=50))

    thread.start()
    assert not thread.join(timeout=0)
    summaries.close()

    assert thread.join(timeout=PATIENCE) and thread.error is None


def test_a_timeout_ends_a_sequence_before_the_next_step() -> None:
    """Counted from when the request came; those that ended before, or have no timeout, are left alone."""
    admits = [
        build_admit("late", max_tokens=9, timeout_s=5),
        build_admit("done", max_tokens=1, timeout_s=5),
        build_admit("patient", max_tokens=3),
    ]
    for admit in admits:
        admit.opened.request.received_at = 100.0
    engine, times = FakeEngine(), [104.0, 104.5, 104.9, 105.0, *[200.0] * 9]

    said, _ = run_script(engine, [*admits, None, None, None, None], clock=lambda: times[engine.steps])

    ends = [message for message in said if isinstance(message, Ended)]
    landed = [output.request_id for message in said if isinstance(message, StepOutputs) for output in message.outputs]
    assert ends == [Ended("late", "timeout")]
    assert landed.count("patient") == 3 and landed.count("done") == 1


def test_a_queue_timeout_ends_what_has_not_begun() -> None:
    """Whoever has had a slot by then goes on."""
    waiting, begun = build_admit("waiting", max_tokens=9, queue_timeout_s=5), build_admit("begun", queue_timeout_s=5)
    begun.sequences[0].num_prefill_tokens = 1
    for admit in (waiting, begun):
        admit.opened.request.received_at = 100.0
    engine, times = FakeEngine(), [104.0, *[105.0] * 9]

    said, _ = run_script(engine, [waiting, begun, None, None], clock=lambda: times[engine.steps])

    assert [message for message in said if isinstance(message, Ended)] == [Ended("waiting", "timeout")]


def test_an_abort_ends_all_samples_of_a_request() -> None:
    """Each of them, whatever became of the others."""
    admit = build_admit("a", max_tokens=9)
    admit.opened.request.num_samples = 2
    sibling = Sequence("a/1", [97], SamplingParams(), frozenset(), max_tokens=9, seed=1)
    admit = Admit([*admit.sequences, sibling], admit.opened)

    said, _ = run_script(FakeEngine(), [admit, None, AbortSequences(admit.opened.request), None])

    assert [message for message in said if isinstance(message, Ended)] == [Ended("a", "abort"), Ended("a/1", "abort")]


def test_progress_is_counted_from_the_work_and_from_each_step() -> None:
    """Idle it is 0 however late it is; with work it grows until a step lands, even while the thread is within one."""
    now, seen = 100.0, []

    class Watched(FakeEngine):
        def step(self) -> list[SequenceOutput]:
            nonlocal now
            before = loop.seconds_since_progress
            now += 7.0  # the step takes so long
            seen.append((before, loop.seconds_since_progress))
            return super().step()

    class Waited(ScriptedInbox):
        def get(self, block: bool = True, timeout: float | None = None) -> Inbound:
            nonlocal now
            now += 1000.0 if block else 1.0
            if block:
                assert loop.seconds_since_progress == 0.0
            return super().get(block, timeout)

    loop: Any = ExecutionLoop(Watched(), BoundedQueue(100), lambda: now)
    loop.inbox = Waited([build_admit(max_tokens=2), None, None, None])

    loop.run()

    # The first step comes after one more look into the inbox; so do the others, after the step before has landed.
    assert seen == [(1.0, 8.0)] * 3
    assert loop.seconds_since_progress == 0.0
