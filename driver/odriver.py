"""oDriver: the threads between a client's words and the engine's tokens.

The life of a request, which thread waits for which, and what an error ends are in
docs/how-it-is-built.md: "A request's way".
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from driver.adapters.loader import AdapterLoader
from driver.adapters.registry import AdapterRegistry
from driver.availability import Availability
from driver.errors import (
    Asleep,
    Draining,
    DriverError,
    DriverStopped,
    DuplicateRequest,
    InternalError,
    NotFound,
    Overloaded,
)
from driver.execution.execution_loop import ExecutionLoop
from driver.grammars.compile_grammars import CompileGrammars
from driver.grammars.compiler import GrammarCompiler
from driver.load_limit import LoadLimit, TokenizerLimit
from driver.metrics.request_listing import RequestRow, listed
from driver.metrics.request_log import RequestLog
from driver.metrics.request_metrics import RequestMetrics
from driver.open_requests import OpenRequest, OpenRequests
from driver.operations.operator_commands import OperatorCommands
from driver.operations.weight_updates import WeightUpdates
from driver.owed_answers import OwedAnswers
from driver.prepare_inputs import PrepareInputs
from driver.process_summary import ProcessSummary
from driver.request import ActiveRequest, RequestOrder, ReturnSample, TokenizerRequest, error_sample
from driver.stages.driver_threads import DriverThreads
from driver.stages.engine_protocol import Engine
from driver.stages.fair_share import most
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.status import DriverStatus
from driver.text.tokenizer import HuggingFaceTokenizer
from driver.thread_messages import AbortSequences, RemoveAdapter, Stop, Summary
from engine.config import MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS
from engine.hub.roots import Root
from engine.metrics.histogram import Histogram
from engine.request_limits import ServingLimits

MAX_SUMMARIES = 16
"""Messages in the queue of the summary thread: some steps, to bridge a short pause."""


class oDriver:
    """Serves requests with ``engine``, which no other thread may use after ``start``. Any thread
    may call any method.

    ``max_queued_requests`` requests may be open without a token, and their prompts may have
    ``max_queued_tokens`` together; ``submit_request`` raises Overloaded for more, first for
    clients that have more than their share. ``model_names`` are what requests may call the model
    itself. ``max_cpu_loras`` adapters may be in memory, 0 if none are served, and all but the first
    are read from below ``adapter_root`` alone. After one of the driver's threads has died and every
    open request has ended, that thread calls ``on_failure``, once.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: HuggingFaceTokenizer,
        *,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
        model_names: Collection[str] = (),
        max_cpu_loras: int = 0,
        adapter_root: Root | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer_info = tokenizer.info()
        """As in a tokenizer_config.json."""
        self.limits = _with_end_token(engine.limits, tokenizer)
        """The engine's, with the tokenizer's end token."""
        self._load_limit = LoadLimit(max_queued_requests, max_queued_tokens, lambda: self._execution.stats)
        self._tokenizer_limit = TokenizerLimit(max_queued_requests)
        self._owed_answers = OwedAnswers()
        most_queued = most(max_queued_requests)
        self.request_log = RequestLog()
        self._observers: list[Callable[[OpenRequest, ReturnSample], None]] = [self.request_log.ended]
        self._summaries: BoundedQueue[Summary] = BoundedQueue(MAX_SUMMARIES)
        self._execution = ExecutionLoop(engine, self._summaries)
        post = self._execution.inbox.put
        self.adapters = AdapterRegistry(max_cpu_loras, model_names, lambda uid: post(RemoveAdapter(uid)))
        """Those that requests can name."""
        self._loader = AdapterLoader(engine.read_adapter, engine.send_adapter, self.adapters, post, adapter_root)
        self._add_adapter = engine.add_adapter
        self._open_requests = OpenRequests(self._tell_observers, self._release)
        self._grammar_compiler = GrammarCompiler(tokenizer, self.limits)
        admit = self._execution.inbox.admit
        self._compile = CompileGrammars(self._grammar_compiler, self._open_requests, admit, most_queued, engine.earlier)
        self._prepare = PrepareInputs(
            tokenizer, self.limits, self._open_requests, admit, 2 * most_queued, self._compile.submit
        )
        self._updates = WeightUpdates(engine, post)
        self.request_metrics = RequestMetrics(self.limits.max_model_len)
        self._summary = ProcessSummary(
            tokenizer, self._open_requests, self._summaries, post, self.request_metrics, self._load_limit.leave
        )
        runs: dict[str, Sequence[Callable[[], None]]] = {
            "prepare inputs": self._prepare.runs,
            "compile grammars": self._compile.runs,
            "load adapters": [self._loader.run],
            "execution loop": [self._execution.run],
            "process summary": [self._summary.run],
            "update weights": [self._updates.run],
        }
        self._threads = DriverThreads(runs, self._close, self._answer_all, on_failure)
        self._availability = Availability(
            self._open_requests,
            post,
            lambda: self._execution.stats,
            lambda: self._execution.state == "paused",
            self._updates.submit,
        )
        self.operations = OperatorCommands(
            self._owed_answers, self._availability, post=post, load=self._loader.submit, update=self._updates.submit
        )
        """What operators have it do."""
        self._started_at = time.monotonic()

    def observe(self, ended: Callable[[OpenRequest, ReturnSample], None]) -> None:
        """Calls this, too, with each request that is refused or gets its last sample; before
        ``start``."""
        self._observers.append(ended)

    def load_first(self, modules: Mapping[str, str]) -> None:
        """Loads adapters from these directories, by name, before ``start``; they are pinned.

        Raises ConfigurationError.
        """
        self._loader.load_first(modules, self._add_adapter)

    def start(self) -> None:
        """Starts the threads; once only."""
        self._threads.start()

    def submit_request(self, request: ActiveRequest) -> None:
        """Takes the request or raises a DriverError other than InternalError, at once."""
        try:
            added = self._open_requests.add(request)
        except DuplicateRequest as refusal:
            self.count_refusal(refusal.code)
            raise
        try:
            self._availability.check()
            added.adapter = self.adapters.acquire(request.model, request.adapters)
            self._load_limit.enter(added)
            self._prepare.submit(added)
        except (NotFound, Overloaded, Asleep, Draining, QueueClosed) as refusal:
            if not self._open_requests.withdraw(added):
                return  # the driver has ended meanwhile, and has notified the channel
            error = DriverStopped(str(self._threads.why_ended)) if isinstance(refusal, QueueClosed) else refusal
            self._tell_observers(added, error_sample(request.request_id, error))
            raise error from None
        except BaseException:
            self._open_requests.withdraw(added)
            self.count_refusal(InternalError.code)
            raise

    def count_refusal(self, code: str) -> None:
        """Counts a request that was refused with this code before it was submitted."""
        self.request_log.count(code)

    def submit_tokenizer_request(self, request: TokenizerRequest) -> None:
        """Takes the request, also when asleep or draining; raises NotFound, Overloaded or
        DriverStopped."""
        self.adapters.check(request.model, request.adapters)
        with self._owed_answers.owing(request.request_id, request.channel) as channel:
            self._tokenizer_limit.submit(replace(request, channel=channel), self._prepare.submit)

    def abort(self, request_id: str) -> bool:
        """Ends the request with reason "abort" and the text so far; False if it is not open."""
        request = self._open_requests.find(request_id)
        if request is None:
            return self._prepare.withdraw_tokenizer_request(request_id)
        if not request.aborted:  # who says it again need not be heard again
            request.aborted = True
            if not self._prepare.withdraw(request):
                self._execution.inbox.put(AbortSequences(request))
        return True

    def status(self) -> DriverStatus:
        """A snapshot, as of the engine's last step; ``seconds_since_progress`` is as of now."""
        deferred = [*self._compile.sequences, *self._execution.held]
        status = DriverStatus(
            **msgspec.structs.asdict(self._execution.stats),
            queued_requests=self._prepare.num_queued,
            deferred=len(deferred),
            deferred_tokens=sum([sequence.num_tokens for sequence in deferred]),
            open_requests=len(self._open_requests),
            adapters={row.name: row.open_requests for row in self.adapters.rows()},
            requests_by_client=self._open_requests.by_client(),
            seconds_since_progress=self.seconds_since_progress,
            stages=self.stages(),
            commands={stage.name: stage.seconds_busy for stage in (self._loader.stage, self._updates.stage)},
            uptime_seconds=time.monotonic() - self._started_at,
            state=self._availability.state(self._execution.state, engine_sleeps=self._execution.stats.asleep),
            default_sampling_params=self.limits.default_sampling_params,
        )
        return msgspec.structs.replace(status, **self.request_metrics.percentiles())

    def requests(self, order: RequestOrder, limit: int | None, client: str | None) -> tuple[list[RequestRow], int]:
        """The first ``limit`` open requests, of one client perhaps, and how many there are."""
        return listed(self._open_requests.all(), time.monotonic(), order, limit, client)

    def drain(self, when_done: Callable[[], None]) -> None:
        """Refuses new requests, and resumes if it is paused; calls ``when_done``, on any thread,
        when no request is open."""
        self._availability.drain(when_done)

    @property
    def seconds_since_progress(self) -> float:
        """Seconds for which the engine has had work and completed no step; 0 when it is idle."""
        return self._execution.seconds_since_progress

    def stages(self) -> dict[str, float]:
        """For how many seconds each stage has been busy with one item; 0 while it waits."""
        return {
            "prepare": self._prepare.stage.seconds_busy,
            "compile": self._compile.stage.seconds_busy,
            "execution": self.seconds_since_progress,
            "summary": self._summary.stage.seconds_busy,
        }

    def stuck_requests(self, limit: float) -> list[str]:
        """The ids of the requests that a stage has been working on for more than ``limit`` s."""
        stages = (self._prepare.stage, self._compile.stage, self._execution.stage, self._summary.stage)
        return [request_id for stage in stages for request_id in stage.stuck(limit)]

    @property
    def iteration_tokens(self) -> Histogram:
        """Tokens of each step."""
        return self._execution.iteration_tokens

    @property
    def step_seconds(self) -> Mapping[str, Histogram]:
        """Seconds of each step, by phase."""
        return self._execution.step_seconds

    def stop(self, reason: str, timeout: float = 10.0) -> None:
        """Ends the threads, and gives every open request and whatever else has no answer the
        error "stopped" with this reason.

        Returns when that is done, by this call or another, or after ``timeout`` seconds: a thread
        that hangs by then (in a step of the device) is logged and left behind.
        """
        self._threads.end(DriverStopped(reason), timeout)

    def fail(self, reason: str, timeout: float = 10.0) -> None:
        """Ends as ``stop`` does, but by a fault: open requests end with "internal"."""
        self._threads.end(InternalError(reason), timeout)

    def _tell_observers(self, request: OpenRequest, last: ReturnSample) -> None:
        for ended in self._observers:
            ended(request, last)

    def _release(self, request: OpenRequest) -> None:
        """Take back what a request had that is open no more."""
        self._load_limit.leave(request)
        if request.adapter is not None:
            self.adapters.release(request.adapter)

    def _close(self, why: DriverError) -> None:
        """Has every thread end."""
        self._owed_answers.close(why)
        self._prepare.close()
        self._compile.close()
        self._loader.close()
        self._updates.close()
        self._execution.inbox.put(Stop())
        self._summaries.close()
        self._grammar_compiler.stop()  # this wakes threads that wait for a grammar

    def _answer_all(self, why: DriverError, have_ended: bool) -> None:
        if have_ended:
            self._grammar_compiler.close()
        self._open_requests.fail_all(why)
        self._owed_answers.fail_all(why)


def _with_end_token(limits: ServingLimits, tokenizer: HuggingFaceTokenizer) -> ServingLimits:
    """The end tokens are the model's and the tokenizer's, which many fine-tunes change alone."""
    ids = dict.fromkeys((*limits.eos_token_ids, *tokenizer.eos_token_ids))
    known = tuple(token_id for token_id in ids if token_id < limits.vocab_size)
    return msgspec.structs.replace(limits, eos_token_ids=known)
