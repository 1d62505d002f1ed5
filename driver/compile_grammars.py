"""Between the first stage and the second, for requests that ask for structured outputs."""

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from driver.errors import DriverError, InvalidRequest
from driver.grammar_allowance import Allowance
from driver.grammar_constraint import FORM, CompiledGrammar, GrammarConstraint
from driver.grammars import GrammarRefused, Grammars
from driver.messages import Admit
from driver.open_requests import OpenRequests
from driver.stage import Stage
from driver.turns import Turns

NUM_THREADS = {False: 2, True: 1}
"""Grammars compiled at a time, by whether that is thorough."""


class _Wanted(NamedTuple):
    admit: Admit
    job: bytes = b""

    @property
    def client(self) -> str:
        return self.admit.opened.request.request.client


class CompileGrammars:
    """Gives sequences their constraints and then admits them. Threads ``run`` it, and wait for other processes.

    Clients take turns. Each grammar is tried for a moment, and what takes longer has turns of its own, so that what is
    quick never waits for what is not. A grammar that several wait for is compiled once; one that cannot be compiled ends
    the requests that ask for it alone.
    """

    def __init__(self, grammars: Grammars, open_requests: OpenRequests, post: Callable[[Admit], None]) -> None:
        self._grammars = grammars
        self._open_requests = open_requests
        self._post = post
        self._turns: dict[bool, Turns[_Wanted]] = {False: Turns(), True: Turns()}
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[_Wanted]] = {}
        """By a grammar that is being compiled: who wants it besides the one that had it compiled."""
        self.stages = {thorough: self._stage(thorough=thorough) for thorough in NUM_THREADS}

    @property
    def runs(self) -> list[Callable[[], None]]:
        """What each of the threads is to run, until ``close``."""
        return [
            partial(self.stages[thorough].run, self._turns[thorough].get)
            for thorough, count in NUM_THREADS.items()
            for _ in range(count)
        ]

    def submit(self, admit: Admit) -> None:
        """Queues the sequences of a request, to be admitted when its grammar is compiled; never waits."""
        self._queue(_Wanted(admit), thorough=False)

    def close(self) -> None:
        """Ends ``runs`` in all threads; what is queued is dropped."""
        for turns in self._turns.values():
            turns.close()

    def _stage(self, *, thorough: bool) -> Stage[_Wanted]:
        return Stage(
            "compile grammars",
            partial(self._handle, thorough=thorough),
            lambda wanted, error: self._open_requests.fail(wanted.admit.opened.request, error),
            lambda wanted: (wanted.client, wanted.admit.opened.request.request_id),
        )

    def _queue(self, wanted: _Wanted, *, thorough: bool) -> None:
        self._turns[thorough].put(wanted.client, wanted)

    def _handle(self, wanted: _Wanted, *, thorough: bool) -> None:
        try:
            self._serve(wanted, thorough=thorough)
        except DriverError as error:
            self._open_requests.fail(wanted.admit.opened.request, error)

    def _serve(self, wanted: _Wanted, *, thorough: bool) -> None:
        admit, job = wanted
        if admit.opened.request.aborted:  # the execution thread ends it as soon as it sees it
            self._post(admit)
            if thorough:  # it was to be compiled for others, too
                self._compiled(job)
            return
        params = admit.sequences[0].params
        assert params.structured_outputs is not None
        job = job or self._grammars.job(params.structured_outputs, hide_eos=params.ignore_eos)
        wanted = _Wanted(admit, job)
        grammar = self._grammars.find(job)
        if grammar is None and (thorough or self._is_first(wanted)):
            grammar = self._compile(wanted, thorough=thorough)
        if grammar is not None:
            self._admit(wanted, grammar, thorough=thorough)

    def _is_first(self, wanted: _Wanted) -> bool:
        """Whether nobody has its grammar compiled now; else it is queued again when that is done."""
        with self._lock:
            if wanted.job in self._waiting:
                self._waiting[wanted.job].append(wanted)
                return False
            if self._grammars.find(wanted.job) is None:
                self._waiting[wanted.job] = []
                return True
        self._queue(wanted, thorough=False)
        return False

    def _compile(self, wanted: _Wanted, *, thorough: bool) -> CompiledGrammar | None:
        """The grammar; None if that takes a thorough worker, for which it is queued then."""
        try:
            grammar = self._grammars.compile(wanted.job, thorough=thorough)
        except GrammarRefused as refusal:
            with self._lock:
                others = self._waiting.pop(wanted.job, [])
            for other in others:
                self._open_requests.fail(other.admit.opened.request, _refused(other, refusal))
            raise _refused(wanted, refusal) from None
        except BaseException:
            self._compiled(wanted.job)
            raise
        if grammar is None:
            self._queue(wanted, thorough=True)
        else:
            self._compiled(wanted.job)
        return grammar

    def _compiled(self, job: bytes) -> None:
        """Nobody compiles it any more: who waited for it comes again."""
        with self._lock:
            others = self._waiting.pop(job, [])
        for other in others:
            self._queue(other, thorough=False)

    def _admit(self, wanted: _Wanted, grammar: CompiledGrammar, *, thorough: bool) -> None:
        """Give all samples their constraints; what they have already may take a thorough worker, too."""
        allowance = Allowance(heavy=grammar.heavy)
        constraints: list[GrammarConstraint] = []
        for sequence in wanted.admit.sequences:
            try:
                constraint = self._grammars.constraint(
                    grammar, allowance, sequence.output_token_ids, thorough=thorough
                )  # fmt: skip
            except GrammarRefused as refusal:
                raise _refused(wanted, refusal) from None
            if constraint is None:
                self._queue(wanted, thorough=True)
                return
            constraints.append(constraint)
        for sequence, constraint in zip(wanted.admit.sequences, constraints, strict=True):
            sequence.constraint = constraint
            sequence.awaits_mask = bool(sequence.output_token_ids)  # it is there, or the end is: whoever looks will see
        self._post(wanted.admit)


def _refused(wanted: _Wanted, refusal: GrammarRefused) -> InvalidRequest:
    params = wanted.admit.sequences[0].params.structured_outputs
    assert params is not None
    return InvalidRequest(f"{FORM}.{params.form}: {refusal}")
