"""From the structured outputs that a client asks for to the constraints of its sequences."""

import threading
from collections import OrderedDict

import msgspec

from driver.errors import DriverStopped, InvalidRequest, Overloaded
from driver.grammars.constraint import FORM, CompiledGrammar, GrammarConstraint
from driver.grammars.guesses import Guesses, NgramIndex
from driver.grammars.matcher_pool import TOO_HARD, Allowance, MatcherPool
from driver.grammars.notation import any_of, has_temperature, json_options, schema_of
from driver.grammars.protocol import (
    BEGIN,
    END,
    ERROR,
    MEMORY_BYTES,
    Beginning,
    GrammarJob,
    TokenizerDefinition,
    WorkerLimits,
    pack,
    unpack_way_on,
)
from driver.grammars.workers import Answer, Worker, WorkerLost, Workers
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.request_limits import MAX_GRAMMAR_BYTES, ServingLimits
from engine.structured_outputs import StructuredOutputsParams

COMPILE_SECONDS = 5.0
TIERS = tuple(WorkerLimits(seconds, seconds) for seconds in (0.02, 0.3, COMPILE_SECONDS))
"""Limits by tier. A grammar is tried in one after the other, so none waits for a slower one."""
LAST = len(TIERS) - 1
PATIENCE = (2.0, 4.0, 18.0)
"""Seconds of real time by tier; workers have a low priority on a busy machine."""
TOO_BUSY = "the machine is too busy to compile a grammar: try again later"
HEAVY_COMPILE_SECONDS = 0.05
"""Processor time to compile from which on the sequences of a grammar are heavy."""
MAX_GRAMMARS = 128
"""Compiled grammars to remember. Each is as large as its text and a mask."""
TOO_HARD_TO_COMPILE = (
    f"it cannot be compiled within {COMPILE_SECONDS:g} seconds, {MEMORY_BYTES >> 30} GiB and a moderate depth of "
    "nesting: make it simpler"
)


class GrammarRefused(Exception):
    """The grammar is wrong, or too hard; the message is for the client."""


class GrammarCompiler:
    """Compiles grammars in worker processes and caches them. For any thread."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, limits: ServingLimits) -> None:
        self._workers = Workers(lambda: _definition(tokenizer, limits))
        self._pool = MatcherPool(self._workers)
        self._num_drafts, self._lookup = limits.num_speculative_tokens, limits.prompt_lookup
        self._idle: list[list[Worker]] = [[] for _ in TIERS]
        self._lock = threading.Lock()  # of what is compiled
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()

    @staticmethod
    def job(params: StructuredOutputsParams, *, hide_eos: bool = False) -> bytes:
        """The encoded GrammarJob of what a client asks for. ``hide_eos`` forbids the end wherever
        the text may go on.

        Raises InvalidRequest for what is too large, is no JSON, or could not be honoured.
        """
        kind, source, options = _source(params)
        size = len(source.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise refused(params, f"it has {size} bytes and may have at most {MAX_GRAMMAR_BYTES}")
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise refused(params, "it holds half a surrogate pair, which is no text") from error
        return msgspec.msgpack.encode(GrammarJob(kind, source, options, hide_eos))

    def find(self, job: bytes) -> CompiledGrammar | None:
        """The grammar, if it is compiled."""
        with self._lock:
            if job in self._compiled:
                self._compiled.move_to_end(job)
            return self._compiled.get(job)

    def compile(self, job: bytes, tier: int) -> CompiledGrammar | None:
        """Compiles a grammar; None if that takes a higher tier.

        Raises GrammarRefused, in the LAST tier also for what takes too long, and DriverErrors.
        """
        answer = self._ask(pack(Beginning(job, self._num_drafts, b"")), tier)
        if answer is None:
            if tier == LAST:
                raise GrammarRefused(TOO_HARD_TO_COMPILE)
            return None
        if answer.kind == ERROR:
            raise GrammarRefused(answer.body.decode())
        heavy = answer.seconds > HEAVY_COMPILE_SECONDS
        grammar = CompiledGrammar(job, unpack_way_on(answer.body), heavy)
        with self._lock:
            self._compiled[job] = grammar
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return grammar

    def index(self, token_ids: list[int]) -> NgramIndex | None:
        """The n-grams of a prompt and of texts before it, if the daemon drafts by these."""
        return None if self._lookup is None else NgramIndex(*self._lookup, token_ids)

    def constraint(
        self,
        grammar: CompiledGrammar,
        allowance: Allowance,
        token_ids: list[int],
        tier: int,
        num_drafts: int | None,
        prompt: NgramIndex | None,
    ) -> GrammarConstraint | None:
        """The constraint of a sequence with these tokens; returns and raises as ``compile``.

        The sequence has at most ``num_drafts`` drafts, if it says so, and the daemon's; with a
        ``prompt`` some of them are guesses.
        """
        self._pool.prepare(heavy=allowance.heavy)
        most = self._num_drafts if num_drafts is None else min(num_drafts, self._num_drafts)
        guesses = None if prompt is None or not most else Guesses(prompt, token_ids)
        constraint = GrammarConstraint(grammar, self._pool, allowance, token_ids, most, guesses)
        if token_ids:
            answer = self._ask(constraint.beginning, tier)
            if answer is None:
                if tier == LAST:
                    raise GrammarRefused(TOO_HARD)
                return None
            constraint.take(answer)
        return constraint

    def stop(self) -> None:
        """Ends all workers; threads that wait for one get DriverStopped."""
        self._workers.stop()

    def close(self) -> None:
        """Closes what is left; only after ``stop``, when no other thread uses a constraint."""
        self._workers.close()
        self._pool.close()

    def _ask(self, beginning: bytes, tier: int) -> Answer | None:
        """A worker's answer to BEGIN; None if the worker ended of it, or had too little time."""
        worker = self._worker(tier)
        try:
            worker.send(0, BEGIN, beginning)
            answer = worker.next_answer(PATIENCE[tier])
            worker.send(0, END)
        except WorkerLost:
            worker.close()
            if self._workers.stopped:
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
        """A worker for this thread alone, idle or new."""
        while True:
            try:
                worker = self._idle[tier].pop()
            except IndexError:
                return self._workers.start(TIERS[tier])
            try:
                worker.receive()
            except WorkerLost:
                worker.close()
            else:
                return worker


def _definition(tokenizer: HuggingFaceTokenizer, limits: ServingLimits) -> TokenizerDefinition:
    """Without ends that are no token of the tokenizer, which llguidance refuses."""
    ends = tuple(filter(tokenizer.has_id, limits.eos_token_ids))
    return TokenizerDefinition(tokenizer.definition(), limits.vocab_size, ends)


def _source(params: StructuredOutputsParams) -> tuple[str, str, dict[str, str | bool]]:
    """A GrammarJob's kind, source and options."""
    if params.is_json:
        return "json", *_schema(params)
    if params.choice is not None:
        return "lark", "start: " + any_of(params.choice), {}
    if params.regex is not None:
        return "regex", params.regex, {}
    assert params.grammar is not None
    if has_temperature(params.grammar):
        raise refused(params, "a rule cannot have a temperature of its own here")
    return "lark", params.grammar, {}


def _schema(params: StructuredOutputsParams) -> tuple[str, dict[str, str | bool]]:
    """The JSON schema as text, which llguidance refuses if it is nested too deeply, and its options."""
    try:
        schema = schema_of(params)
        return msgspec.json.encode(schema).decode(), json_options(params, schema)
    except ValueError as error:
        raise refused(params, error) from error


def refused(params: StructuredOutputsParams, why: object) -> InvalidRequest:
    """The error for the grammar's client."""
    return InvalidRequest(f"{FORM}.{params.form}: {why}")
