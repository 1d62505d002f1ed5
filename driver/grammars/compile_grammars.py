"""Between the first stage and the second, for requests that ask for structured outputs."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from driver.errors import DriverError, InvalidRequest, Overloaded
from driver.grammars.grammar_allowance import Allowance
from driver.grammars.grammar_constraint import FORM, CompiledGrammar, GrammarConstraint
from driver.grammars.grammar_store import LAST, PATIENCE, TIERS, TOO_BUSY, GrammarRefused, Grammars
from driver.open_requests import OpenRequest, OpenRequests
from driver.stages.fair_share import Holder
from driver.stages.stage import Stage
from driver.stages.turn_queue import TurnQueue
from driver.thread_messages import Admit

NUM_THREADS = (1,) * len(TIERS)
"""Grammars compiled at a time, by tier."""


class _Wanted(NamedTuple):
    """A grammar for the sequences of a request."""

    admit: Admit
    job: bytes = b""
    """The grammar's name, once somebody has looked."""
    tier: int = 0

    @property
    def request(self) -> OpenRequest:
        return self.admit.opened.request


class CompileGrammars:
    """Gives sequences their constraints and then admits them. Threads ``run`` it, and wait for other processes.

    Clients take turns (see TurnQueue). Each grammar is tried for a moment, and what takes longer has turns of its own, so that what is
    quick never waits for what is not. A grammar that several wait for is compiled once; one that cannot be compiled ends
    the requests that ask for it alone. At most ``max_queued`` wait, which is as many as may be open without a token.
    """

    def __init__(
        self, grammars: Grammars, open_requests: OpenRequests, post: Callable[[Admit], None], max_queued: int
    ) -> None:
        self._grammars = grammars
        self._open_requests = open_requests
        self._post = post
        self._lanes: list[TurnQueue[_Wanted]] = [TurnQueue(max_queued, _holder) for _ in TIERS]
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[_Wanted]] = {}
        """By a grammar that is being compiled: who wants it besides the one that had it compiled."""
        self.stage = Stage("compile grammars", self._handle, self._fail, _source)

    @property
    def runs(self) -> list[Callable[[], None]]:
        """What each of the threads is to run, until ``close``."""
        return [
            partial(lane.run, self.stage.work)
            for lane, count in zip(self._lanes, NUM_THREADS, strict=True)
            for _ in range(count)
        ]

    def submit(self, admit: Admit) -> None:
        """Queues the sequences of a request, to be admitted when its grammar is compiled; never waits."""
        self._queue(_Wanted(admit))

    def close(self) -> None:
        """Ends ``runs`` in all threads; what is queued is dropped."""
        for lane in self._lanes:
            lane.close()

    def _queue(self, wanted: _Wanted) -> None:
        self._lanes[wanted.tier].put_nowait(wanted)

    def _fail(self, wanted: _Wanted, error: DriverError) -> None:
        self._open_requests.fail(wanted.request, error)

    def _handle(self, wanted: _Wanted) -> None:
        if wanted.request.aborted:  # the execution thread ends it as soon as it sees it
            self._post(wanted.admit)
            if wanted.tier:  # it was to be compiled for others, too
                self._release(wanted.job)
            return
        try:
            wanted = self._named(wanted)
            grammar = self._grammars.find(wanted.job)
            if grammar is None and (wanted.tier or self._is_first(wanted)):
                grammar = self._compile(wanted)
            if grammar is not None:
                self._admit(wanted, grammar)
        except DriverError as error:
            self._fail(wanted, error)

    def _named(self, wanted: _Wanted) -> _Wanted:
        if wanted.job:
            return wanted
        params = wanted.admit.sequences[0].params
        assert params.structured_outputs is not None
        return wanted._replace(job=self._grammars.job(params.structured_outputs, hide_eos=params.ignore_eos))

    def _is_first(self, wanted: _Wanted) -> bool:
        """Whether nobody has its grammar compiled already; else it is queued again when that is done."""
        with self._lock:
            if wanted.job in self._waiting:
                self._waiting[wanted.job].append(wanted)
                return False
            if self._grammars.find(wanted.job) is None:
                self._waiting[wanted.job] = []
                return True
        self._queue(wanted)  # it has just been compiled
        return False

    def _compile(self, wanted: _Wanted) -> CompiledGrammar | None:
        """The grammar; None if that takes a higher tier, for which it is queued then."""
        try:
            grammar = self._grammars.compile(wanted.job, wanted.tier)
        except GrammarRefused as refusal:
            with self._lock:
                others = self._waiting.pop(wanted.job, [])
            for other in others:
                self._fail(other, _refused(other, refusal))
            raise _refused(wanted, refusal) from None
        except BaseException:
            self._release(wanted.job)
            raise
        if grammar is None:
            self._queue(wanted._replace(tier=wanted.tier + 1))
        else:
            self._release(wanted.job)
        return grammar

    def _release(self, job: bytes) -> None:
        """Nobody compiles it any more: who waited for it comes again."""
        with self._lock:
            others = self._waiting.pop(job, [])
        for other in others:
            self._queue(other)

    def _admit(self, wanted: _Wanted, grammar: CompiledGrammar) -> None:
        """Give all samples their constraints; what tokens they have already may take a higher tier, too."""
        allowance = Allowance(heavy=grammar.heavy)
        constraints: list[GrammarConstraint] = []
        give_up_at = time.monotonic() + PATIENCE[wanted.tier]
        for sequence in wanted.admit.sequences:
            tokens, constraint = sequence.output_token_ids, None
            if time.monotonic() < give_up_at:
                try:
                    constraint = self._grammars.constraint(grammar, allowance, tokens, wanted.tier)
                except GrammarRefused as refusal:
                    raise _refused(wanted, refusal) from None
            elif wanted.tier == LAST:
                raise Overloaded(TOO_BUSY)
            if constraint is None:
                self._queue(wanted._replace(tier=wanted.tier + 1))
                return
            constraints.append(constraint)
        for sequence, constraint in zip(wanted.admit.sequences, constraints, strict=True):
            sequence.constraint = constraint
            sequence.awaits_mask = bool(sequence.output_token_ids)  # it is there, or the end is: whoever looks will see
        self._post(wanted.admit)


def _holder(wanted: _Wanted) -> Holder:
    return wanted.request.holder


def _source(wanted: _Wanted) -> tuple[str, str]:
    return wanted.request.source


def _refused(wanted: _Wanted, refusal: GrammarRefused) -> InvalidRequest:
    params = wanted.admit.sequences[0].params.structured_outputs
    assert params is not None
    return InvalidRequest(f"{FORM}.{params.form}: {refusal}")
