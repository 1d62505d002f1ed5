"""From structured outputs, as a client asks for them, to the constraints of its sequences."""

import threading
from collections import OrderedDict

import msgspec
import numpy as np

from driver.errors import DriverStopped, Overloaded
from driver.grammars.grammar_allowance import TOO_HARD, Allowance
from driver.grammars.grammar_constraint import CompiledGrammar, GrammarConstraint
from driver.grammars.grammar_followers import Followers
from driver.grammars.grammar_jobs import grammar_job
from driver.grammars.grammar_protocol import (
    BEGIN,
    END,
    ERROR,
    MEMORY_BYTES,
    TokenizerDefinition,
    WorkerLimits,
    pack_beginning,
)
from driver.grammars.grammar_worker import Answer, Worker, WorkerLost
from driver.grammars.grammar_worker_source import WorkerSource
from driver.text.tokenizer import Tokenizer
from engine.config import ServingLimits
from engine.structured_outputs import StructuredOutputsParams

COMPILE_SECONDS = 5.0
TIERS = tuple(WorkerLimits(seconds, seconds) for seconds in (0.02, 0.3, COMPILE_SECONDS))
"""Of workers that compile. A grammar is tried in one after the other: most are done in a moment, and wait for no others."""
LAST = len(TIERS) - 1
PATIENCE = (2.0, 4.0, 18.0)
"""Seconds, on the clock: these processes go behind others, so a busy machine may give them little of its time."""
TOO_BUSY = "the machine is too busy to compile a grammar: try again later"
HEAVY_SECONDS = 0.05
"""Of processor time to compile, from which on a grammar is followed among heavy ones: there it is compiled again."""
MAX_GRAMMARS = 128
"""Compiled grammars that are known. Each is as large as its text and a mask."""
TOO_HARD_TO_COMPILE = (
    f"it cannot be compiled within {COMPILE_SECONDS:g} seconds, {MEMORY_BYTES >> 30} GiB and a moderate depth of "
    "nesting: make it simpler"
)


class GrammarRefused(Exception):
    """The grammar is wrong, or too hard; the message is for the client."""


class Grammars:
    """Compiles grammars in other processes, and knows what it has compiled. Any thread may call any method."""

    def __init__(self, tokenizer: Tokenizer, limits: ServingLimits) -> None:
        self._source = WorkerSource(
            lambda: TokenizerDefinition(tokenizer.definition(), limits.vocab_size, limits.eos_token_ids)
        )
        self._followers = Followers(self._source)
        self._idle: list[list[Worker]] = [[] for _ in TIERS]
        self._lock = threading.Lock()  # of what is compiled
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self.num_compiled = 0
        """How many times a grammar has been compiled for good."""

    @staticmethod
    def job(params: StructuredOutputsParams, *, hide_eos: bool = False) -> bytes:
        """The grammar's name, in full. Raises InvalidRequest. ``hide_eos`` forbids the end wherever the text may go on."""
        return msgspec.msgpack.encode(grammar_job(params, hide_eos=hide_eos))

    def find(self, job: bytes) -> CompiledGrammar | None:
        """The grammar, if it is compiled."""
        with self._lock:
            if job in self._compiled:
                self._compiled.move_to_end(job)
            return self._compiled.get(job)

    def compile(self, job: bytes, tier: int) -> CompiledGrammar | None:
        """Compile it; None if that takes a higher tier.

        Raises GrammarRefused, in the LAST tier also for what takes too long, and DriverErrors: Overloaded, for one.
        """
        answer = self._ask(pack_beginning(job, b""), tier)
        if answer is None:
            if tier == LAST:
                raise GrammarRefused(TOO_HARD_TO_COMPILE)
            return None
        if answer.how == ERROR:
            raise GrammarRefused(answer.body.decode())
        heavy = answer.seconds > HEAVY_SECONDS
        grammar = CompiledGrammar(job, np.frombuffer(answer.body, np.int32), heavy)
        with self._lock:
            self.num_compiled += 1
            self._compiled[job] = grammar
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return grammar

    def constraint(
        self, grammar: CompiledGrammar, allowance: Allowance, token_ids: list[int], tier: int
    ) -> GrammarConstraint | None:
        """One for a sequence that has these tokens, at rest. None, GrammarRefused and DriverErrors are as of ``compile``."""
        self._followers.prepare(heavy=allowance.heavy)
        constraint = GrammarConstraint(grammar, self._followers, allowance, token_ids)
        if token_ids:
            answer = self._ask(constraint.beginning, tier)
            if answer is None:
                if tier == LAST:
                    raise GrammarRefused(TOO_HARD)
                return None
            constraint.take(answer)
        return constraint

    def stop(self) -> None:
        """Ends all of the processes; who waits for one hears that it is gone."""
        self._source.stop()

    def close(self) -> None:
        """After ``stop``, when no other thread has a constraint in use: closes what is left of them."""
        self._source.close()
        self._followers.close()

    def _ask(self, beginning: bytes, tier: int) -> Answer | None:
        """What a worker says of a matcher that begins so; None if it ended in the middle, or had too little time."""
        worker = self._worker(tier)
        try:
            worker.send(0, BEGIN, beginning)
            answer = worker.next_answer(PATIENCE[tier])
            worker.send(0, END)
        except WorkerLost:
            worker.close()
            if self._source.stopped:
                raise DriverStopped("the driver is stopped") from None
            return None
        except TimeoutError as error:
            worker.close()
            if tier == LAST:
                raise Overloaded(TOO_BUSY) from error
            return None
        self._idle[tier].append(worker)
        return answer

    def _worker(self, tier: int) -> Worker:
        """One for this thread alone; it may have been idle."""
        while True:
            try:
                worker = self._idle[tier].pop()
            except IndexError:
                return self._source.worker(TIERS[tier])
            try:
                worker.receive()
            except WorkerLost:
                worker.close()
            else:
                return worker
