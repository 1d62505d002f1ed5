"""The second stage: the one thread that uses the engine."""

import math
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from driver.errors import DriverError, InvalidRequest
from driver.execution.deadlines import Deadlines
from driver.execution.inbox import Inbox
from driver.execution.items import Changed, Item, Overdue, source
from driver.execution.progress import Progress
from driver.open_requests import OpenRequest
from driver.operations.engine_changes import EngineChanges
from driver.operations.weight_updates import FinishUpdate, FinishWake
from driver.request import ReturnSample, done_sample, error_sample
from driver.stages.engine_protocol import Engine
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.stages.stage import Stage
from driver.thread_messages import (
    AbortSequences,
    AddAdapter,
    Admit,
    Change,
    Compiled,
    Ended,
    Finished,
    PauseEngine,
    ProfileEngine,
    RemoveAdapter,
    ResetPrefixCache,
    ResumeEngine,
    SleepEngine,
    StepOutputs,
    Stop,
    Summary,
    WakeEngine,
)
from engine.metrics.histogram import Histogram
from engine.metrics.profiler import Profiler, ProfilerError
from engine.scheduling.sequence import Sequence, SequenceOutput

HEARD, LEAST_HEARD = 0.2, 0.005
"""For how long messages are handled between two steps, however fast they come: a part of what the step took, or so many
seconds. A flood's come as fast as they are handled, and all others wait for the next step."""
LOOKS = 0.02
"""Seconds between two looks whether a step is over that was to take longer."""
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Buckets of vLLM's histogram of the same name."""


class ExecutionLoop:
    """Handles messages, steps the engine and sends its tokens on.

    An exception from one message ends the request of that message; one from a step, or from a
    command to the whole engine, ends the loop.

    It waits for a message if the engine is idle, and in ``summaries.put`` while the summary thread
    is far behind, so that tokens do not pile up. That is no deadlock: the summary thread never
    waits for this one, as the inbox is unbounded. Closing ``summaries`` ends the wait.
    """

    def __init__(
        self, engine: Engine, summaries: BoundedQueue[Summary], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inbox = Inbox()
        self.stats = engine.stats()
        """The latest snapshot; this thread replaces it, whole, and any thread may read it."""
        self.stage: Stage[Item] = Stage("execution loop", self._handle, self._fail, source)
        self._engine = engine
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        """Tokens of each step; this thread writes it."""
        self._profiler = Profiler()
        self._deadlines = Deadlines()
        self._clock = clock
        self._heard_at = clock()
        """When messages were handled last, or the engine changed: that is no step."""
        self._summaries = summaries
        self._changes = EngineChanges(engine, self._send, self._end)
        self._progress = Progress(clock)

    @property
    def step_seconds(self) -> Mapping[str, Histogram]:
        """Seconds of each step, by phase; this thread writes them."""
        return self._engine.step_seconds

    @property
    def seconds_since_progress(self) -> float:
        """For how long there has been work and no step has ended, even if this thread hangs.

        A command, which runs no step, counts only beyond COMMAND_PATIENCE.
        """
        return self._progress.seconds_since

    @property
    def state(self) -> str:
        """ "serving", "pausing" while open requests end first, or "paused"."""
        return self._changes.state

    @property
    def held(self) -> list[Sequence]:
        """The sequences that a pause or an update keeps from the engine."""
        return self._changes.held

    def run(self) -> None:
        """Serves until Stop comes or ``summaries`` is closed."""
        self._engine.compile_staged(lambda: self.inbox.put(Compiled()))
        try:
            with suppress(QueueClosed):
                while self._handle_messages():
                    for sequence_id in self._deadlines.overdue(self._clock()):
                        self.stage.work(Overdue(sequence_id))
                    if self._engine.has_work and not self._changes.paused:
                        self._step()
                    while (due := self._changes.next_due()) is not None:
                        self._change(due)
        finally:
            self._progress.not_owed()
            self._engine.close()

    def _handle_messages(self) -> bool:
        """Handles messages; if the engine is idle or paused, waits for one, or for a timeout, and beside a step that takes
        long until the next one is due. False after Stop."""
        idle = self._changes.paused or not self._engine.has_work
        if idle:
            self._progress.not_owed()
        while not idle and (spare := self._engine.seconds_to_spare) > 0:
            time.sleep(min(spare, LOOKS))  # messages stay where they are: who prepares more of them waits, too
        now = self._clock()
        until = now + max(LEAST_HEARD, HEARD * (now - self._heard_at))
        with suppress(queue.Empty):
            while True:
                message = self.inbox.get(block=idle, timeout=self._patience() if idle else None)
                if idle:
                    idle, until = False, self._clock() + LEAST_HEARD
                    self._progress.made()
                match message:
                    case Stop():
                        return False
                    case Compiled():
                        self._engine.adopt()
                        self.stats = self._engine.stats()
                    case SleepEngine() | WakeEngine() | FinishWake() | PauseEngine() | ResumeEngine() | FinishUpdate():
                        if not self._changes.defer(message):
                            self._change(message)
                    case _:
                        self.stage.work(message)
                if self._clock() >= until:
                    break
        self._heard_at = self._clock()
        return True

    def _patience(self) -> float | None:
        """Seconds to the next timeout of a sequence; None if there is none."""
        at = self._deadlines.next
        return None if at == math.inf else max(0.0, at - self._clock())

    def _handle(self, item: Item) -> None:
        answer = self._do(item)
        # first: whoever is answered may ask for the state at once
        self.stats = self._engine.stats()
        answer()

    def _do(self, item: Item) -> Callable[[], None]:
        """Does what an item asks for; returns what tells who waits for it."""
        match item:
            case Admit():
                self._admit(item)
            case AbortSequences(request=request):
                self._abort(request)
            case Finished(sequence_id=sequence_id):
                self._deadlines.discard(sequence_id)
                self._finish(sequence_id)
            case Overdue(sequence_id=sequence_id):
                self._end(sequence_id, "timeout")
            case ProfileEngine():
                return partial(item.channel.put, self._profile(item))
            case ResetPrefixCache(request_id=request_id, channel=channel):
                count = self._engine.reset_prefix_cache()
                text = f"the prefix cache is empty: {count} pages are forgotten"
                return partial(channel.put, done_sample(request_id, text))
            case AddAdapter():
                self._engine.add_adapter(item.adapter)
                return partial(item.done, None)
            case RemoveAdapter(uid=uid):
                self._engine.remove_adapter(uid)
            case Changed(change=change, answer=answer):
                return partial(change.channel.put, answer)
        return lambda: None

    def _fail(self, item: Item, error: DriverError) -> None:
        """Ends the request of an item by the summary thread, which knows whether it is open."""
        match item:
            case Admit(sequences=sequences, opened=opened):
                self._fail_sequences(opened.request.sequence_ids, error)
                for sequence in sequences:
                    self._finish(sequence.request_id)
                    if sequence.constraint is not None:
                        sequence.constraint.close()
            case AbortSequences(request=request):
                self._fail_sequences(request.sequence_ids, error)
            case Finished(sequence_id=sequence_id) | Overdue(sequence_id=sequence_id):
                self._fail_sequences([sequence_id], error)
            case (
                ProfileEngine(request_id=request_id, channel=channel)
                | ResetPrefixCache(request_id=request_id, channel=channel)
            ):
                channel.put(error_sample(request_id, error))
            case AddAdapter():
                item.done(error)
            case RemoveAdapter():
                """Nobody waits for it."""
            case Changed():
                """Its channel has been called, and raised."""

    def _fail_sequences(self, sequence_ids: list[str], error: DriverError) -> None:
        why = str(error)
        self._summaries.put(
            StepOutputs(
                [SequenceOutput(sequence_id, [], "error", error=why, internal=True) for sequence_id in sequence_ids]
            )
        )

    def _change(self, change: Change) -> None:
        """An exception from the change is a fault of the engine, and of no request."""
        with self._progress.running_no_step():
            answer = self._changes.run(change)
        self._heard_at = self._clock()
        # first: the client may ask for the state as soon as it has the answer
        self.stats = self._engine.stats()
        if answer is not None:
            self.stage.work(Changed(change, answer))

    def _profile(self, command: ProfileEngine) -> ReturnSample:
        """Starts or writes a trace between two steps, so that it has whole ones."""
        try:
            if command.directory is None:
                with self._progress.running_no_step():
                    directory = self._profiler.stop()
            else:
                directory = command.directory
                self._profiler.start(directory)
        except ProfilerError as refusal:
            return error_sample(command.request_id, InvalidRequest(str(refusal)))
        return done_sample(command.request_id, directory)

    def _admit(self, message: Admit) -> None:
        request, params = message.opened.request, message.opened.params
        # first, so that the summary thread knows the request if adding it fails
        self._summaries.put(message.opened)
        for sequence in message.sequences:
            self._changes.add(sequence)
            self._deadlines.add(sequence, request.received_at, params.timeout_s, params.queue_timeout_s)
        if request.aborted:
            self._abort(request)

    def _abort(self, request: OpenRequest) -> None:
        """A sequence unknown to the engine has ended, or ``_admit`` will see the flag."""
        for sequence_id in request.sequence_ids:
            self._deadlines.discard(sequence_id)
            self._end(sequence_id, "abort")

    def _end(self, sequence_id: str, finish_reason: str) -> None:
        if self._finish(sequence_id):
            self.stats = self._engine.stats()
            self._summaries.put(Ended(sequence_id, finish_reason))

    def _finish(self, sequence_id: str) -> bool:
        return self._changes.finish_held(sequence_id) or self._engine.finish(sequence_id)

    def _step(self) -> None:
        outputs = self._engine.step()
        before = self.stats
        # first: the client may ask for it as soon as it has its last sample
        self.stats = self._engine.stats()
        if self.stats.steps > before.steps:
            self._progress.made()
            self.iteration_tokens.observe(self.stats.tokens - before.tokens)
        if outputs:
            self._send(outputs)

    def _send(self, outputs: list[SequenceOutput]) -> None:
        """Have the tokens of steps delivered, which the weights of now have made."""
        for output in outputs:
            if output.finish_reason is not None:
                self._deadlines.discard(output.request_id)
        self._summaries.put(StepOutputs(outputs, self.stats.weight_version))
