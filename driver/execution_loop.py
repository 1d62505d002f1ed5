"""The second stage: the one thread that touches the engine."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec

from driver.deadlines import Deadlines
from driver.errors import DriverError, InvalidRequest
from driver.metrics.request_metrics import Histogram
from driver.open_requests import OpenRequest
from driver.request import RequestError, ReturnSample, Usage
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.stages.stage import Stage
from driver.thread_messages import (
    Abort,
    Admit,
    Compiled,
    Ended,
    Finished,
    Inbound,
    Landed,
    Profile,
    Sleep,
    Stop,
    Summary,
    Wake,
)
from engine.config import EngineStats, ServingLimits
from engine.profiler import Profiler, ProfilerError
from engine.scheduling.sequence import Sequence, SequenceOutput


class Engine(Protocol):
    """What the driver asks of an engine: ``oEngine``, or a fake one. One thread uses it."""

    @property
    def limits(self) -> ServingLimits:
        """What a sequence may be; constant, so any thread may read it."""

    @property
    def has_work(self) -> bool:
        """Whether something waits, runs or is in flight on the device."""

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence; never fails."""

    def finish(self, request_id: str) -> bool:
        """Ends a sequence early and frees what it holds; False if it is unknown or has ended."""

    def step(self) -> list[SequenceOutput]:
        """Plans and dispatches one step and lands at most one; waits for the device where it has to."""

    def stats(self) -> EngineStats:
        """A snapshot."""

    def compile_staged(self, notify: Callable[[], None]) -> None:
        """Begins to compile what readiness did not wait for; ``notify``, on any thread, asks for an ``adopt``."""

    def adopt(self) -> None:
        """Uses what has been compiled; raises what went wrong with it."""

    def sleep(self) -> None:
        """Gives the pages' memory back. Nothing waits or runs then."""

    def wake(self) -> None:
        """Takes that memory again."""

    def close(self) -> None:
        """Compiles nothing more."""


COMMAND_PATIENCE = 600.0
"""Seconds that an operator's command may take, such as to write a long trace, before they count as no progress."""
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Buckets of vLLM's histogram of that name."""


class ExecutionLoop:
    """Hears messages, steps the engine, hands tokens on. It waits for a message if and only if the engine is idle.

    A ``timeout_s``, counted from when the request came, is looked at before each step. Whatever one message raises ends
    the request that it is about; what a step raises, or a command to the engine as a whole, ends the loop.

    It may also wait in ``summaries.put``, when the summary thread is that far behind: the device pauses rather than
    tokens piling up. The summary thread never waits for this one (the inbox is unbounded), so neither can they for
    each other; and closing ``summaries`` ends the wait.
    """

    def __init__(
        self, engine: Engine, summaries: BoundedQueue[Summary], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.stats = engine.stats()
        """The latest snapshot; this thread replaces it, whole, and anyone may read it."""
        self.stage: Stage[_Item] = Stage("execution loop", self._handle, self._fail, _source)
        self._engine = engine
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        """Tokens of each step; this thread counts."""
        self._profiler = Profiler()
        self._deadlines = Deadlines()
        self._clock = clock
        self._summaries = summaries
        self._progressed_at: float | None = None
        """When a step last landed, or when the work began; None while there is none. Ahead of now, for a command."""

    @property
    def seconds_since_progress(self) -> float:
        """For how long there has been work and no step has landed; 0 when idle. It grows while this thread hangs, too.

        A command, which computes nothing, counts from when it has taken COMMAND_PATIENCE.
        """
        progressed_at = self._progressed_at
        return 0.0 if progressed_at is None else max(0.0, self._clock() - progressed_at)

    def run(self) -> None:
        """Serves until Stop is heard or ``summaries`` is closed."""
        self._engine.compile_staged(lambda: self.inbox.put(Compiled()))
        try:
            with suppress(QueueClosed):
                while self._hear():
                    for sequence_id in self._deadlines.overdue(self._clock()):
                        self.stage.work(_Overdue(sequence_id))
                    if self._engine.has_work:
                        self._step()
        finally:
            self._progressed_at = None
            self._engine.close()

    def _hear(self) -> bool:
        """Handles every message that is there, waiting for one if the engine has nothing to do. False after Stop."""
        idle = not self._engine.has_work
        if idle:
            self._progressed_at = None
        with suppress(queue.Empty):
            while True:
                message = self.inbox.get(block=idle)
                if idle:
                    idle, self._progressed_at = False, self._clock()
                match message:
                    case Stop():
                        return False
                    case Compiled():
                        self._engine.adopt()
                        self.stats = self._engine.stats()
                    case Sleep() | Wake():
                        self.stage.work(_Obeyed(message, self._obey(message)))
                    case _:
                        self.stage.work(message)
        return True

    def _handle(self, item: "_Item") -> None:
        match item:
            case Admit():
                self._admit(item)
            case Abort(request=request):
                self._abort(request)
            case Finished(sequence_id=sequence_id):
                self._deadlines.discard(sequence_id)
                self._engine.finish(sequence_id)
            case _Overdue(sequence_id=sequence_id):
                self._end(sequence_id, "timeout")
            case Profile():
                item.channel.put(self._profiled(item))
            case _Obeyed(command=command, answer=answer):
                command.channel.put(answer)
        self.stats = self._engine.stats()

    def _fail(self, item: "_Item", error: DriverError) -> None:
        """End the request that an item is about, by way of the summary thread, which knows whether it has ended already."""
        match item:
            case Admit(sequences=sequences, opened=opened):
                self._fail_sequences(opened.request.sequence_ids, error)
                for sequence in sequences:
                    self._engine.finish(sequence.request_id)
                    if sequence.constraint is not None:
                        sequence.constraint.close()
            case Abort(request=request):
                self._fail_sequences(request.sequence_ids, error)
            case Finished(sequence_id=sequence_id) | _Overdue(sequence_id=sequence_id):
                self._fail_sequences([sequence_id], error)
            case Profile(request_id=request_id, channel=channel):
                channel.put(_refused(request_id, error))
            case _Obeyed():
                """Its channel was told, and raised."""

    def _fail_sequences(self, sequence_ids: list[str], error: DriverError) -> None:
        why = str(error)
        self._summaries.put(
            Landed([SequenceOutput(sequence_id, [], "error", error=why, internal=True) for sequence_id in sequence_ids])
        )

    def _obey(self, command: Sleep | Wake) -> ReturnSample:
        """What that raises is the engine's own fault, and no request's."""
        if isinstance(command, Sleep) and command.cancelled:
            return _refused(command.request_id, InvalidRequest("the daemon was woken before it slept"))
        with self._computing_nothing():
            self._engine.sleep() if isinstance(command, Sleep) else self._engine.wake()
        self.stats = self._engine.stats()  # first, so that whoever has the answer finds it so
        return _done(command.request_id, "asleep" if isinstance(command, Sleep) else "awake")

    @contextmanager
    def _computing_nothing(self) -> Iterator[None]:
        """No step lands meanwhile, and none should."""
        self._progressed_at = self._clock() + COMMAND_PATIENCE
        try:
            yield
        finally:
            self._progressed_at = self._clock()

    def _profiled(self, asked: Profile) -> ReturnSample:
        """Between two steps, so that a trace has whole ones; no step is made while it is written."""
        try:
            if asked.directory is None:
                with self._computing_nothing():
                    directory = self._profiler.stop()
            else:
                directory = asked.directory
                self._profiler.start(directory)
        except ProfilerError as refusal:
            return _refused(asked.request_id, InvalidRequest(str(refusal)))
        return _done(asked.request_id, directory)

    def _admit(self, message: Admit) -> None:
        request, params = message.opened.request, message.opened.params
        self._summaries.put(message.opened)  # first, so that there is somebody to tell of what goes wrong with it
        for sequence in message.sequences:
            self._engine.add(sequence)
            self._deadlines.add(sequence, request.received_at, params.timeout_s, params.queue_timeout_s)
        if request.aborted:
            self._abort(request)

    def _abort(self, request: OpenRequest) -> None:
        """Unknown to the engine means: not admitted yet, and the flag will tell; or ended, and its end is on its way."""
        for sequence_id in request.sequence_ids:
            self._deadlines.discard(sequence_id)
            self._end(sequence_id, "abort")

    def _end(self, sequence_id: str, finish_reason: str) -> None:
        if self._engine.finish(sequence_id):
            self.stats = self._engine.stats()
            self._summaries.put(Ended(sequence_id, finish_reason))

    def _step(self) -> None:
        outputs = self._engine.step()
        before = self.stats
        self.stats = self._engine.stats()  # first, so that whoever has a last sample finds it counted
        if self.stats.steps > before.steps:
            self._progressed_at = self._clock()
            self.iteration_tokens.observe(self.stats.tokens - before.tokens)
        if outputs:
            for output in outputs:
                if output.finish_reason is not None:
                    self._deadlines.discard(output.request_id)
            self._summaries.put(Landed(outputs))


def _done(request_id: str, text: str) -> ReturnSample:
    return ReturnSample(request_id=request_id, text=text, finish_reason="stop", usage=Usage(0, 0))


def _refused(request_id: str, error: DriverError) -> ReturnSample:
    return ReturnSample(request_id=request_id, error=RequestError(error.code, str(error)))


class _Overdue(msgspec.Struct, frozen=True):
    """The time of this sequence is up."""

    sequence_id: str


class _Obeyed(msgspec.Struct, frozen=True):
    """A command to the engine as a whole has been carried out."""

    command: Sleep | Wake
    answer: ReturnSample


_Item = Admit | Abort | Finished | Profile | _Overdue | _Obeyed


def _source(item: _Item) -> tuple[str, str]:
    """Where there is no request to ask, the id names its client."""
    match item:
        case Admit(opened=opened):
            return opened.request.source
        case Abort(request=request):
            return request.source
        case Finished(sequence_id=sequence_id) | _Overdue(sequence_id=sequence_id):
            return sequence_id, sequence_id
        case Profile(request_id=request_id):
            return request_id, request_id
        case _Obeyed(command=command):
            return command.request_id, command.request_id
