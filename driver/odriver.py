"""oDriver: the threads between a client's words and the engine's tokens.

The life of a request
---------------------
1. ``submit_request``, on the caller's thread (the socket thread, in the daemon, which must never wait), enters the
   request in the table of open requests and in a bounded queue of prepare inputs, where clients take turns, or raises at
   once: DuplicateRequest, Overloaded, DriverStopped. A request that was refused so has had its answer; every other gets
   exactly one last sample.
2. One of the **prepare inputs** threads checks parameters, applies the chat template, refuses what cannot fit, tokenises,
   checks lengths, and posts Admit(sequence) to the execution thread's inbox. A client's mistake goes to that client's
   channel, and ends there.
   Where structured outputs are asked for, the Admit goes by one of the **compile grammars** threads, which has another
   process compile the grammar, unless it is known, and gives each sequence its constraint.
3. The **execution loop** thread, the only one that touches the engine, adds the sequence, tells the summary thread that
   the request is Opened, and steps the engine. What a step lands goes to the summary thread as Landed(outputs).
4. The **process summary** thread detokenises, looks for stop strings and puts samples into the request's channel. A stop
   string found is posted as Finished to the inbox, so that the engine frees what the sequence holds.
5. The end, by token, length, stop string or abort, is the last sample. The id is free again just before it is delivered.

A request that goes on with what an earlier one gave (``resume_token_ids``) differs in three places: prepare inputs makes
that the sequence's output from the beginning and reads it again as a text, its constraint has the mask behind it, and the
summary thread goes on with that text, without delivering it, before anything new.

An abort ends a request that is queued still at once. Of any other it is a flag on the open request and then an Abort in
the inbox: the execution thread either knows the sequence
and finishes it, or will see the flag when the Admit comes by, or the request has ended and nothing happens. Abort and
tokens reach the summary thread through one queue, so no token follows the last sample.

Who may wait for whom
---------------------
Prepare waits for requests, the compile threads for grammars, the summary thread for summaries, the execution thread for
a message when the engine is idle: each for work, and no work means no CPU. Under load, the execution thread alone may
wait for another's progress, in a full summary queue; the summary thread and prepare inputs say what they have to say into
the inbox, which takes any number, and into channels, which must not block. A process of grammars answers or is ended
by its alarm. So there is no circle to deadlock in.

What goes wrong with a request
------------------------------
Whatever the content of one request raises in a stage ends that request with "internal" and a traceback in the log, and
the stage goes on (driver/stages/stage.py). Only a run of such ends, of several clients and with no success between, is taken
for a fault of the stage, and its thread dies of it.

What goes wrong on the device
-----------------------------
A step that fails, and a row of it whose logits are not finite, end as outputs with an error: the requests in it hear
"internal" and why, an error of one sample ends its request with all of its samples, and everybody else goes on
(engine/oengine.py). A device that fails step after step ends the execution thread.

The end
-------
``stop`` closes the bounded queues, which wakes and ends whoever waits in them, posts Stop, joins the threads and gives
"stopped" to every request still open. A thread that dies does the same as its last act, with "internal", and calls
``on_failure``. Whoever comes first does it; the others find it done.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from driver.compile_grammars import CompileGrammars
from driver.errors import Asleep, Draining, DriverError, DriverStopped, InternalError, Overloaded
from driver.execution_loop import Engine, ExecutionLoop
from driver.grammars.compiler import GrammarCompiler
from driver.load_limit import LoadLimit, TokenizerLimit
from driver.metrics.request_log import RequestLog
from driver.metrics.request_metrics import Histogram, RequestMetrics
from driver.open_requests import OpenRequests
from driver.prepare_inputs import PrepareInputs
from driver.process_summary import ProcessSummary
from driver.request import ActiveRequest, ReturnChannel, TokenizerRequest
from driver.stages.fair_share import most
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.stages.safe_thread import SafeThread
from driver.text.tokenizer import Tokenizer
from driver.thread_messages import Abort, Profile, Sleep, Stop, Summary, Wake
from engine.config import MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS, EngineStats

logger = logging.getLogger(__name__)

MAX_SUMMARIES = 16
"""Messages on their way to the summary thread: some steps' worth, to ride out a pause of it and no more."""
STATES = ("serving", "falling asleep", "asleep", "draining")


class DriverStatus(EngineStats, frozen=True):
    """The engine's snapshot and the driver's own numbers."""

    queued_requests: int = 0
    """Requests that wait to be prepared."""
    open_requests: int = 0
    """Requests that are owed a last sample: queued, waiting, running or on their way out."""
    requests_by_client: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Of each client that has any open: how many, and how many of them have no token yet."""
    seconds_since_progress: float = 0.0
    """For how long the engine has had work and has landed no step; 0 when it is idle. Health is this, not a heartbeat."""
    stages: dict[str, float] = msgspec.field(default_factory=dict)
    """Of each stage: for how many seconds it has been busy with what has been longest in its hands; 0 while it waits.
    That of the execution stage is ``seconds_since_progress``."""
    uptime_seconds: float = 0.0
    state: str = "serving"
    """One of STATES."""
    ttft_seconds_p50: float = 0.0
    """From here on: of the samples that ended last, up to the first token, between tokens, and up to the end."""
    ttft_seconds_p99: float = 0.0
    tpot_seconds_p50: float = 0.0
    tpot_seconds_p99: float = 0.0
    e2e_seconds_p50: float = 0.0
    e2e_seconds_p99: float = 0.0


class oDriver:
    """Serves requests with ``engine``, which is its own from ``start`` on. Any thread may call any method.

    ``max_queued_requests`` may be open without a token, with prompts of ``max_queued_tokens`` together; then
    ``submit_request`` raises Overloaded, first for clients with more than their part of them. ``on_failure`` is called
    once, on the dying thread, after one of the driver's threads died and every open request heard of it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer_info = tokenizer.info()
        """What a tokenizer_config.json would say."""
        self._load_limit = LoadLimit(max_queued_requests, max_queued_tokens)
        self._tokenizer_limit = TokenizerLimit(max_queued_requests)
        most_queued = most(max_queued_requests)
        self._on_failure = on_failure
        self._log = RequestLog()
        self._open_requests = OpenRequests(self._log.ended)
        self._summaries: BoundedQueue[Summary] = BoundedQueue(MAX_SUMMARIES)
        self._execution = ExecutionLoop(engine, self._summaries)
        post = self._execution.inbox.put
        self._grammars = GrammarCompiler(tokenizer, engine.limits)
        self._compile = CompileGrammars(self._grammars, self._open_requests, post, most_queued)
        self._prepare = PrepareInputs(
            tokenizer, engine.limits, self._open_requests, post, 2 * most_queued, self._compile.submit
        )
        self.request_metrics = RequestMetrics(engine.limits.max_model_len)
        self._summary = ProcessSummary(tokenizer, self._open_requests, self._summaries, post, self.request_metrics)
        self._threads = [
            *[SafeThread("prepare inputs", run, self._thread_died) for run in self._prepare.runs],
            *[SafeThread("compile grammars", run, self._thread_died) for run in self._compile.runs],
            SafeThread("execution loop", self._execution.run, self._thread_died),
            SafeThread("process summary", self._summary.run, self._thread_died),
        ]
        self._refusal: Draining | Asleep | None = None
        """What new requests are told; the control thread and the daemon's write it, whole."""
        self._sleep: Sleep | None = None
        self._why_stopped: DriverError = DriverStopped("the driver is stopped")
        self._right_to_end = threading.Lock()  # taken once, never given back: the first to end the driver has it
        self._ended = threading.Event()
        self._started_at = time.monotonic()

    def start(self) -> None:
        """Starts the threads; once only."""
        for thread in self._threads:
            thread.start()

    def submit_request(self, request: ActiveRequest) -> None:
        """Takes the request or raises DuplicateRequest, Overloaded, Asleep, Draining or DriverStopped, at once."""
        added = self._open_requests.add(request)
        try:
            if self._refusal is not None:
                raise self._refusal
            waiting = [other for other in self._open_requests.waiting() if other is not added]
            self._load_limit.check(added, waiting, self._execution.stats)
            self._prepare.submit(added)
        except (Overloaded, Asleep, Draining, QueueClosed) as refusal:
            if not self._open_requests.withdraw(added):
                return  # the end of the driver came in between, and has told the channel
            if isinstance(refusal, QueueClosed):
                raise DriverStopped(str(self._why_stopped)) from None
            self._log.refused(request, refusal)
            raise
        except BaseException:
            self._open_requests.withdraw(added)
            raise

    def submit_tokenizer_request(self, request: TokenizerRequest) -> None:
        """Takes the request or raises Overloaded or DriverStopped, at once; who drains or sleeps answers it, too."""
        try:
            self._tokenizer_limit.submit(request, self._prepare.submit)
        except QueueClosed:
            raise DriverStopped(str(self._why_stopped)) from None

    def abort(self, request_id: str) -> bool:
        """Ends the request with finish reason "abort" and what text it has; False if it is unknown or has ended."""
        request = self._open_requests.find(request_id)
        if request is None:
            return self._prepare.withdraw_tokenizer_request(request_id)
        request.aborted = True
        if not self._prepare.withdraw(request):
            self._execution.inbox.put(Abort(request))
        return True

    def status(self) -> DriverStatus:
        """A snapshot, as of the engine's last step; ``seconds_since_progress`` is as of now."""
        status = DriverStatus(
            **msgspec.structs.asdict(self._execution.stats),
            queued_requests=self._prepare.num_queued,
            open_requests=len(self._open_requests),
            requests_by_client=self._open_requests.by_client(),
            seconds_since_progress=self.seconds_since_progress,
            stages=self.stages(),
            uptime_seconds=time.monotonic() - self._started_at,
            state=self._state(),
        )
        return msgspec.structs.replace(status, **self.request_metrics.percentiles())

    def drain(self, when_done: Callable[[], None]) -> None:
        """Takes no new work; ``when_done`` is called, on whatever thread, when every open request has ended."""
        self._refusal = Draining("the daemon finishes what it has and ends: try again when it has been started anew")
        self._open_requests.when_none(when_done)

    def sleep(self, request_id: str, channel: ReturnChannel) -> None:
        """Takes no new work, and once every open request has ended gives the pages' memory back and tells the channel.

        Raises Draining and DriverStopped at once.
        """
        self._check_going()
        self._refusal = Asleep("the daemon is asleep: try again when it has been woken, with `odriver wake`")
        self._sleep = message = Sleep(request_id, channel)
        self._open_requests.when_none(lambda: self._execution.inbox.put(message))

    def wake(self, request_id: str, channel: ReturnChannel) -> None:
        """Takes the memory again, if it was given back, tells the channel, and serves. Raises as ``sleep`` does."""
        self._check_going()
        if self._sleep is not None:
            self._sleep.cancelled = True
        self._execution.inbox.put(Wake(request_id, channel))
        self._refusal = None  # now, as what is admitted comes behind that in the inbox

    @property
    def seconds_since_progress(self) -> float:
        """For how long the engine has had work and has landed no step; 0 when it is idle."""
        return self._execution.seconds_since_progress

    def stages(self) -> dict[str, float]:
        """For how many seconds each stage has been busy with one item, or its work without progress; 0 while it waits."""
        return {
            "prepare": self._prepare.stage.seconds_busy,
            "compile": self._compile.stage.seconds_busy,
            "execution": self.seconds_since_progress,
            "summary": self._summary.stage.seconds_busy,
        }

    def stuck_requests(self, limit: float) -> list[str]:
        """The ids of the requests that have been in a stage's hands for more than so many seconds."""
        stages = (self._prepare.stage, self._compile.stage, self._execution.stage, self._summary.stage)
        return [request_id for stage in stages for request_id in stage.stuck(limit)]

    @property
    def failed(self) -> Mapping[str, int]:
        """How many requests ended with an error, by its code."""
        return self._log.failed

    @property
    def iteration_tokens(self) -> Histogram:
        """Tokens of each step."""
        return self._execution.iteration_tokens

    def profile(self, request_id: str, directory: str | None, channel: ReturnChannel) -> None:
        """Begins a trace of the process, for this directory, or ends and writes the one under way where it is None.

        The channel gets one sample: the directory as its text, or an error. Raises DriverStopped at once.
        """
        if self._right_to_end.locked():
            raise DriverStopped(str(self._why_stopped))
        self._execution.inbox.put(Profile(request_id, directory, channel))

    def stop(self, reason: str, timeout: float = 10.0) -> None:
        """Ends the threads and gives every open request the error "stopped" with this reason.

        Returns when that is done, by this call or another, or after ``timeout`` seconds: a thread that hangs by then
        (in a step of the device) is left behind, logged, and can reach no client any more.
        """
        if not self._end(DriverStopped(reason), timeout):
            self._ended.wait(timeout)

    def fail(self, reason: str, timeout: float = 10.0) -> None:
        """Ends as ``stop`` does, by a fault: open requests, one of which may be its cause, hear "internal"."""
        if not self._end(InternalError(reason), timeout):
            self._ended.wait(timeout)

    def _check_going(self) -> None:
        if self._right_to_end.locked():
            raise DriverStopped(str(self._why_stopped))
        if isinstance(self._refusal, Draining):
            raise self._refusal

    def _state(self) -> str:
        match self._refusal:
            case Draining():
                return "draining"
            case Asleep():
                return "asleep" if self._execution.stats.asleep else "falling asleep"
        return "serving"

    def _thread_died(self, name: str, error: BaseException) -> None:
        reason = f"the {name} thread died of {type(error).__name__}: {error}"
        if self._end(InternalError(reason), timeout=10.0) and self._on_failure is not None:
            self._on_failure(reason)

    def _end(self, why: DriverError, timeout: float) -> bool:
        """Ends the driver, if nobody else has begun to."""
        if not self._right_to_end.acquire(blocking=False):
            return False
        self._why_stopped = why
        self._prepare.close()
        self._compile.close()
        self._execution.inbox.put(Stop())
        self._summaries.close()
        self._grammars.stop()  # which wakes who waits for a grammar
        if self._join(timeout):
            self._grammars.close()
        self._open_requests.fail_all(why)
        self._ended.set()
        return True

    def _join(self, timeout: float) -> bool:
        """Whether all threads have ended in time."""
        deadline = time.monotonic() + timeout
        left = [thread for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
        for thread in left:
            logger.error("thread %s still runs %g seconds after it was told to stop", thread.name, timeout)
        return not left
