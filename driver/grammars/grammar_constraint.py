"""The rule of one sequence's output, for the engine."""

import time
from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from driver.grammars.grammar_allowance import TOO_HARD, Allowance
from driver.grammars.grammar_followers import Follower, Followers
from driver.grammars.grammar_protocol import ADVANCE, COMPLETE, GO, TOKEN, pack_beginning
from driver.grammars.grammar_worker import Answer

FORM = "structured_outputs"
WORKER_PATIENCE = 30.0
"""Seconds that a sequence waits for a worker where there is none."""


class CompiledGrammar(NamedTuple):
    """What is known of a grammar that could be compiled; any number of sequences may follow it."""

    job: bytes
    """An encoded GrammarJob."""
    first_mask: NDArray[np.int32]
    heavy: bool
    """Whether it took so long that a worker that follows quick ones must not compile it."""


class GrammarConstraint:
    """The TokenConstraint of a sequence. Its matcher, in a worker, exists from the first ``advance`` on, as long as it runs.

    Before that, and after ``suspend``, it is its last mask and the tokens behind it. One thread uses it.
    """

    def __init__(
        self, grammar: CompiledGrammar, followers: Followers, allowance: Allowance, token_ids: list[int]
    ) -> None:
        self.mask: NDArray[np.int32] = grammar.first_mask
        self.complete = False
        self.error: str | None = None
        self.internal = False
        self.allowance = allowance
        self._job = grammar.job
        self._followers = followers
        self._tokens = array("I", token_ids)
        self._follower: Follower | None = None
        self._awaits = False
        self._suspended = False
        self._alone_since: float | None = None
        """When it has found no worker."""

    @property
    def beginning(self) -> bytes:
        """What its matcher can be made of anew."""
        return pack_beginning(self._job, self._tokens.tobytes())

    def advance(self, token_id: int) -> None:
        """One more token; returns at once."""
        self._tokens.append(token_id)
        self._awaits, self._suspended = True, False
        if self._follower is None:
            self._begin()
        else:
            self._follower.ask(self, ADVANCE, TOKEN.pack(token_id))

    def hear(self) -> bool:
        """Whether the answer to the last token has come; returns at once."""
        if self._awaits and self._follower is not None:
            self._follower.hear()
        if self._awaits and self._follower is None:
            self._begin()
        return not self._awaits

    def fileno(self) -> int:
        """Readable when an answer is there, be it another's."""
        return self._followers.fileno() if self._follower is None else self._follower.fileno()

    def suspend(self) -> None:
        """Do without a matcher until the next token; an answer that is awaited is still heard."""
        self._suspended = True
        if not self._awaits:
            self._leave()

    def close(self) -> None:
        """End its matcher; a second time changes nothing."""
        self._awaits = False
        self._leave()

    def answered(self, answer: Answer) -> None:
        """The worker knows what may come next."""
        self.take(answer)
        if self._suspended or self.error is not None or self.complete:
            self._leave()

    def take(self, answer: Answer) -> None:
        """Be what an answer says."""
        self._awaits = False
        if answer.how == GO:
            self.mask = np.frombuffer(answer.body, np.int32)
        elif answer.how == COMPLETE:
            self.complete = True
        else:
            self.error = f"{FORM}: {answer.body.decode()}"

    def lost(self) -> None:
        """Its worker has ended, and its matcher with it."""
        self._follower = None

    def _begin(self) -> None:
        if not self._followers.is_judged(self.allowance):
            return
        if self.allowance.spent:
            self._fail(f"{FORM}: {TOO_HARD}")
            return
        self._follower = self._followers.begin(self, self.beginning)
        if self._follower is not None:
            self._alone_since = None
            return
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > WORKER_PATIENCE:
            self.internal = True
            self._fail(f"no process could be started for its grammar in {WORKER_PATIENCE:g} seconds: try again later")

    def _fail(self, why: str) -> None:
        self.error = why
        self._awaits = False

    def _leave(self) -> None:
        if self._follower is not None:
            self._follower.end(self)
            self._follower = None
