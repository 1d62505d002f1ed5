"""The stage between prepare inputs and the execution loop that compiles grammars."""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from functools import partial
from typing import NamedTuple

from driver.errors import DriverError, Overloaded
from driver.grammars.compiler import LAST, PATIENCE, TIERS, TOO_BUSY, GrammarCompiler, GrammarRefused, refused
from driver.grammars.constraint import CompiledGrammar, GrammarConstraint
from driver.grammars.matcher_pool import Allowance
from driver.open_requests import OpenRequest, OpenRequests
from driver.stages.queues import TurnQueue
from driver.stages.stage import Stage
from driver.thread_messages import Admit
from engine.scheduling.sequence import Sequence
from engine.structured_outputs import StructuredOutputsParams

NUM_THREADS = (1,) * len(TIERS)
"""Grammars compiled at a time, by tier."""
MOST_INDEXED = 4096
"""Of a request's earlier texts, the last tokens that are indexed for it: milliseconds, and half a
megabyte."""


class _GrammarRequest(NamedTuple):
    """A request whose sequences need a grammar."""

    admit: Admit
    job: bytes = b""
    """The encoded GrammarJob; empty until a thread has made it."""
    tier: int = 0

    @property
    def request(self) -> OpenRequest:
        return self.admit.opened.request


class CompileGrammars:
    """Gives sequences their constraints and then admits them. Its threads wait for workers.

    Clients take turns (see TurnQueue). Each grammar is tried for a moment; one that takes longer
    moves to a lane of a higher tier, so that quick grammars never wait for slow ones. A grammar
    that several requests need is compiled once; one that cannot be compiled ends only the requests
    that ask for it. At most ``max_queued`` requests wait, as many as may be open. ``earlier`` are the
    engine's texts of earlier requests, with a negative token behind each.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        open_requests: OpenRequests,
        post: Callable[[Admit], None],
        max_queued: int,
        earlier: Callable[[Sequence], ListOf[int]],
    ) -> None:
        self._compiler, self._earlier = compiler, earlier
        self._open_requests = open_requests
        self._post = post
        self._lanes: list[TurnQueue[_GrammarRequest]] = [
            TurnQueue(max_queued, lambda item: item.request.holder) for _ in TIERS
        ]
        self._pending: dict[str, Admit] = {}
        """By the id of its first sequence, each request that waits for its grammar; each change of
        it is one atomic operation."""
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[_GrammarRequest]] = {}
        """By a grammar that is being compiled: the other requests that need it."""
        self.stage: Stage[_GrammarRequest] = Stage(
            "compile grammars", self._handle, self._fail, lambda item: item.request.source
        )

    @property
    def runs(self) -> list[Callable[[], None]]:
        """The targets of the stage's threads; they run until ``close``."""
        return [
            partial(lane.run, self.stage.work)
            for lane, count in zip(self._lanes, NUM_THREADS, strict=True)
            for _ in range(count)
        ]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that wait for their grammars; for any thread."""
        return [sequence for admit in list(self._pending.values()) for sequence in admit.sequences]

    def submit(self, admit: Admit) -> None:
        """Queues the sequences of a request until their grammar is compiled; never waits."""
        self._pending[admit.opened.request.sequence_id] = admit
        self._queue(_GrammarRequest(admit))

    def close(self) -> None:
        """Ends ``runs`` in all threads and drops what is queued."""
        for lane in self._lanes:
            lane.close()

    def _queue(self, item: _GrammarRequest) -> None:
        self._lanes[item.tier].put_nowait(item)

    def _hand_on(self, admit: Admit) -> None:
        self._pending.pop(admit.opened.request.sequence_id, None)
        self._post(admit)

    def _fail(self, item: _GrammarRequest, error: DriverError) -> None:
        self._pending.pop(item.request.sequence_id, None)
        self._open_requests.fail(item.request, error)

    def _handle(self, item: _GrammarRequest) -> None:
        if item.request.aborted:  # the execution thread ends it as soon as it sees the flag
            self._hand_on(item.admit)
            if item.tier:  # other requests may wait for this grammar
                self._release(item.job)
            return
        try:
            if not item.job:
                hide_eos = item.admit.opened.params.ignore_eos
                item = item._replace(job=self._compiler.job(_params(item), hide_eos=hide_eos))
            grammar = self._compiler.find(item.job)
            if grammar is None and (item.tier or self._is_first(item)):
                grammar = self._compile(item)
            if grammar is not None:
                self._admit(item, grammar)
        except DriverError as error:
            self._fail(item, error)

    def _is_first(self, item: _GrammarRequest) -> bool:
        """Whether no other request has its grammar compiled; otherwise it is queued again
        later."""
        with self._lock:
            if item.job in self._waiting:
                self._waiting[item.job].append(item)
                return False
            if self._compiler.find(item.job) is None:
                self._waiting[item.job] = []
                return True
        self._queue(item)  # it has just been compiled
        return False

    def _compile(self, item: _GrammarRequest) -> CompiledGrammar | None:
        """The grammar; None if that takes a higher tier, for which the request is queued then."""
        try:
            grammar = self._compiler.compile(item.job, item.tier)
        except GrammarRefused as refusal:
            with self._lock:
                others = self._waiting.pop(item.job, [])
            for other in others:
                self._fail(other, refused(_params(other), refusal))
            raise refused(_params(item), refusal) from None
        except BaseException:
            self._release(item.job)
            raise
        if grammar is None:
            self._queue(item._replace(tier=item.tier + 1))
        else:
            self._release(item.job)
        return grammar

    def _release(self, job: bytes) -> None:
        """Queues the requests again that waited for this grammar, as it is compiled no longer."""
        with self._lock:
            others = self._waiting.pop(job, [])
        for other in others:
            self._queue(other)

    def _admit(self, item: _GrammarRequest, grammar: CompiledGrammar) -> None:
        """Gives all samples their constraints; if they have tokens that may take a higher tier."""
        allowance = Allowance(heavy=grammar.heavy)
        constraints: list[GrammarConstraint] = []
        give_up_at = time.monotonic() + PATIENCE[item.tier]
        num_drafts = item.admit.opened.params.num_speculative_tokens
        first = item.admit.sequences[0]
        earlier = self._earlier(first)[-MOST_INDEXED:]
        prompt = None if num_drafts == 0 else self._compiler.index([*earlier, *first.prompt_token_ids])
        for sequence in item.admit.sequences:
            tokens, constraint = sequence.output_token_ids, None
            if time.monotonic() < give_up_at:
                try:
                    constraint = self._compiler.constraint(grammar, allowance, tokens, item.tier, num_drafts, prompt)
                except GrammarRefused as refusal:
                    raise refused(_params(item), refusal) from None
            elif item.tier == LAST:
                raise Overloaded(TOO_BUSY)
            if constraint is None:
                self._queue(item._replace(tier=item.tier + 1))
                return
            constraints.append(constraint)
        for sequence, constraint in zip(item.admit.sequences, constraints, strict=True):
            sequence.constraint = constraint
            # the mask or the end is there: the engine looks
            sequence.awaits_mask = bool(sequence.output_token_ids)
        self._hand_on(item.admit)


def _params(item: _GrammarRequest) -> StructuredOutputsParams:
    params = item.admit.opened.params.structured_outputs
    assert params is not None
    return params
