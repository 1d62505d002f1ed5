"""The grammar of one sequence's output, as the engine sees it."""

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from driver.grammars.guesses import Guesses
from driver.grammars.matcher_pool import TOO_HARD, Allowance, MatcherPool, SharedWorker
from driver.grammars.protocol import ADVANCE, COMPLETE, GO, Advance, Beginning, WayOn, pack, unpack_way_on
from driver.grammars.workers import Answer

FORM = "structured_outputs"
WORKER_PATIENCE = 30.0
"""Seconds that a sequence waits for a worker where there is none."""


class CompiledGrammar(NamedTuple):
    """The daemon's record of a grammar that compiles; any number of sequences may use it."""

    job: bytes
    """An encoded GrammarJob."""
    first: WayOn
    """How a text begins."""
    heavy: bool
    """Whether it took so long to compile that its sequences are heavy from the start."""


class GrammarConstraint:
    """The TokenConstraint of a sequence. One thread uses it.

    It has a matcher in a worker from the first ``advance`` to ``suspend`` or ``close``. Without
    one it is its last mask and the tokens behind that, from which a new matcher can begin.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        pool: MatcherPool,
        allowance: Allowance,
        token_ids: list[int],
        num_drafts: int,
        guesses: Guesses | None,
    ) -> None:
        self.mask: NDArray[np.int32]
        self.expected: list[int]
        self.num_forced: int
        self.expected_masks: list[NDArray[np.int32]]
        self._guesses = guesses
        self._go(grammar.first)
        self.complete = False
        self.error: str | None = None
        self.internal = False
        self.allowance = allowance
        self._job = grammar.job
        self._num_drafts = num_drafts
        """How many it is asked for."""
        self._pool = pool
        self._tokens = array("I", token_ids)
        self._worker: SharedWorker | None = None
        self._awaits_answer = False
        self._suspended = False
        self._without_worker_since: float | None = None

    @property
    def guess_acceptance(self) -> float:
        """See TokenConstraint."""
        return 0.0 if self._guesses is None else self._guesses.acceptance

    @property
    def beginning(self) -> bytes:
        """The body of BEGIN that makes its matcher again."""
        num_drafts = 0 if self.allowance.ended_workers else self._num_drafts
        return pack(Beginning(self._job, num_drafts, self._tokens.tobytes()))

    def advance(self, *token_ids: int, guess: Sequence[int] = ()) -> None:
        """Reads the next tokens, and asks about those of a guess; returns at once."""
        self._tokens.extend(token_ids)
        self._awaits_answer, self._suspended = True, False
        if self._guesses is not None:
            guess = self._guesses.read(token_ids, 2 * self._num_drafts + 1)
        if self._worker is None:
            self._begin()
        else:
            self._worker.send(self, ADVANCE, pack(Advance(list(token_ids), list(guess))))

    def hear(self, received: set[object]) -> bool:
        """Whether the answer to the last token has come; returns at once. A worker in ``received``
        has been asked already."""
        if self._awaits_answer and self._worker is not None and self._worker not in received:
            received.add(self._worker)
            self._worker.receive()
        if self._awaits_answer and self._worker is None:
            self._begin()
        return not self._awaits_answer

    def fileno(self) -> int:
        """Readable when an answer has come, perhaps to another constraint of the same worker."""
        return self._pool.fileno() if self._worker is None else self._worker.fileno()

    def suspend(self) -> None:
        """Drops the matcher until the next token; an answer on its way is still received."""
        self._suspended = True
        if not self._awaits_answer:
            self._end_matcher()

    def close(self) -> None:
        """Ends its matcher; a second time changes nothing."""
        self._awaits_answer = False
        self._end_matcher()

    def answered(self, answer: Answer) -> None:
        """Takes the answer, and ends the matcher if that is all."""
        self.take(answer)
        if self._suspended or self.error is not None or self.complete:
            self._end_matcher()

    def take(self, answer: Answer) -> None:
        """Sets masks and expected tokens, completion or error from the answer."""
        self._awaits_answer = False
        if answer.kind == GO:
            self._go(unpack_way_on(answer.body))
        elif answer.kind == COMPLETE:
            self.complete = True
        else:
            self.error = f"{FORM}: {answer.body.decode()}"

    def lost(self) -> None:
        """Its worker has ended, and its matcher with it."""
        self._worker = None

    def _go(self, way: WayOn) -> None:
        self.mask = np.frombuffer(way.mask, np.int32)
        self.expected, self.num_forced = way.expected, way.num_forced
        if self._guesses is not None:
            self._guesses.answered(way.expected, way.num_forced)
        self.expected_masks = [np.frombuffer(mask, np.int32) for mask in way.masks]

    def _begin(self) -> None:
        if not self._pool.is_judged(self.allowance):
            return
        if self.allowance.spent:
            self._fail(f"{FORM}: {TOO_HARD}")
            return
        self._worker = self._pool.begin(self, self.beginning)
        if self._worker is not None:
            self._without_worker_since = None
            return
        now = time.monotonic()
        if self._without_worker_since is None:
            self._without_worker_since = now
        elif now - self._without_worker_since > WORKER_PATIENCE:
            self.internal = True
            self._fail(f"no process could be started for its grammar in {WORKER_PATIENCE:g} seconds: try again later")

    def _fail(self, why: str) -> None:
        self.error = why
        self._awaits_answer = False

    def _end_matcher(self) -> None:
        if self._worker is not None:
            self._worker.end(self)
            self._worker = None
