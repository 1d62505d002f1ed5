"""The stage between prepare inputs and the engine: whose grammar is compiled when, how often, and what its fault ends."""

import queue
import threading
from collections.abc import Iterator

import pytest

from driver.errors import Overloaded
from driver.grammars import compile_grammars
from driver.grammars.compile_grammars import MOST_INDEXED, CompileGrammars
from driver.grammars.compiler import LAST, GrammarRefused
from driver.grammars.constraint import CompiledGrammar
from driver.grammars.protocol import WayOn
from driver.open_requests import OpenRequests
from driver.request import ActiveRequest
from driver.stages.safe_thread import SafeThread
from driver.thread_messages import Admit, Opened
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.structured_outputs import StructuredOutputsParams

PATIENCE = 300


ANYTHING = WayOn(bytes(4), [], 0, [])


class FakeGrammars:
    """Compiles what the test lets it: a grammar that begins with ``slow`` takes the last tier, ``wrong`` is refused,
    ``broken`` raises, ``short`` finds no process, and ``gated`` waits for the gate, where it is compiled for good."""

    def __init__(self) -> None:
        self.log: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.gate = threading.Semaphore(0)
        self.compiled: dict[bytes, CompiledGrammar] = {}

    @staticmethod
    def job(params, *, hide_eos):
        return params.regex.encode() + b"/" * hide_eos

    def find(self, job):
        return self.compiled.get(job)

    def compile(self, job, tier):
        text = job.decode()
        self.log.put(text)
        if "gated" in text and (tier == LAST or "slow" not in text):
            assert self.gate.acquire(timeout=PATIENCE)
        if "slow" in text and tier < LAST:
            return None
        if "wrong" in text:
            raise GrammarRefused("it is wrong")
        if "short" in text:
            raise Overloaded("no process")
        if "broken" in text:
            raise RuntimeError("cannot compile")
        return self.compiled.setdefault(job, CompiledGrammar(job, ANYTHING, heavy=tier == LAST))

    def index(self, prompt_token_ids):
        return list(prompt_token_ids)

    def constraint(self, grammar, allowance, token_ids, tier, num_drafts, prompt):
        self.num_drafts, self.prompt = num_drafts, prompt
        return None if token_ids and tier < LAST else (grammar.job, allowance, token_ids)

    def next(self) -> str:
        """What is compiled next."""
        return self.log.get(timeout=PATIENCE)


class Stage:
    """The stage with its threads, and what comes out of it."""

    def __init__(self) -> None:
        self.grammars = FakeGrammars()
        self.told: queue.SimpleQueue = queue.SimpleQueue()
        self.open_requests = OpenRequests(lambda *_: None, lambda _: None)
        self.admitted: queue.SimpleQueue[Admit] = queue.SimpleQueue()
        self.earlier = list(range(MOST_INDEXED + 5))
        self.stage = CompileGrammars(self.grammars, self.open_requests, self.admitted.put, 64, lambda _: self.earlier)
        self.threads = [SafeThread("compile", run, lambda *_: None) for run in self.stage.runs]
        for thread in self.threads:
            thread.start()

    def submit(self, request_id: str, regex: str, *, client: str = "a", n: int = 1, tokens: tuple[int, ...] = ()):
        """Queue a request; it is open then."""
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        request = self.open_requests.add(ActiveRequest(request_id=request_id, channel=self.told, client=client))
        sequences = [Sequence(f"{request_id}/{i}", [1], params, frozenset(), 9, seed=0) for i in range(n)]
        for sequence in sequences:
            sequence.output_token_ids = list(tokens)
        self.stage.submit(Admit(sequences, Opened(request, sequences, [1], 1, params)))
        return request

    def next(self) -> str:
        """Who is admitted next."""
        return self.admitted.get(timeout=PATIENCE).opened.request.request_id


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """With one thread of each kind, which all join in the end."""
    monkeypatch.setattr(compile_grammars, "NUM_THREADS", (1, 1, 1))
    stage = Stage()
    yield stage
    stage.stage.close()
    stage.grammars.gate.release(99)
    assert all(thread.join(PATIENCE) and thread.error is None for thread in stage.threads)
    assert stage.stage._waiting == stage.stage._pending == {}


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """With several threads of each kind."""
    monkeypatch.setattr(compile_grammars, "NUM_THREADS", (3, 2, 2))
    stage = Stage()
    yield stage
    stage.stage.close()
    stage.grammars.gate.release(99)
    assert all(thread.join(PATIENCE) and thread.error is None for thread in stage.threads)


def test_all_samples_of_a_request_share_one_grammar_and_one_account(stage):
    """Compiled once, and later not at all."""
    stage.submit("one", "x", n=64)
    admit = stage.admitted.get(timeout=PATIENCE)
    stage.submit("two", "x")
    other = stage.admitted.get(timeout=PATIENCE)

    constraints = [sequence.constraint for sequence in admit.sequences]
    assert len({id(allowance) for _, allowance, _ in constraints}) == 1
    assert other.sequences[0].constraint[1] is not constraints[0][1]
    assert stage.grammars.next() == "x" and stage.grammars.log.empty()


def test_what_a_prompt_and_the_last_of_earlier_texts_say_is_looked_in_for_guesses(stage):
    """No more of the texts than takes milliseconds to index, as the thread has other requests too."""
    stage.submit("one", "x")
    admit = stage.admitted.get(timeout=PATIENCE)

    assert stage.grammars.prompt == [*stage.earlier[-MOST_INDEXED:], *admit.sequences[0].prompt_token_ids]
    assert len(stage.earlier) > MOST_INDEXED


def test_who_waits_is_known(stage):
    """In the queue, for another's grammar and in hand, until it is admitted or refused."""
    for number, regex in enumerate(("gated", "gated", "x", "wrong")):
        stage.submit(str(number), regex, n=2)
    assert stage.grammars.next() == "gated"
    assert [sequence.request_id for sequence in stage.stage.sequences[:3]] == ["0/0", "0/1", "1/0"]
    assert len(stage.stage.sequences) == 8

    stage.grammars.gate.release(2)
    assert {stage.next() for _ in range(3)} == {"0", "1", "2"}
    assert stage.told.get(timeout=PATIENCE).error is not None
    assert stage.stage.sequences == []


def test_clients_take_turns(stage):
    """Whoever asks for one waits for what is in hand of another's many, and for no more of them."""
    stage.submit("gate", "gated")
    assert stage.grammars.next() == "gated"
    for number in range(5):
        stage.submit(f"many {number}", f"m{number}")
    stage.submit("one", "o", client="b")
    stage.grammars.gate.release()

    assert [stage.next() for _ in range(3)] == ["gate", "one", "many 0"]


def test_what_is_quick_waits_for_nothing_slow(stage):
    """What takes a higher tier leaves the others' way after a moment; and it is heavy."""
    for number in range(5):
        stage.submit(f"slow {number}", f"slow gated {number}")
    stage.submit("quick", "q", client="b")
    assert stage.next() == "quick"
    stage.grammars.gate.release(5)

    admits = [stage.admitted.get(timeout=PATIENCE) for _ in range(5)]
    assert [admit.opened.request.request_id for admit in admits] == [f"slow {number}" for number in range(5)]
    assert all(admit.sequences[0].constraint[1].heavy for admit in admits)


@pytest.mark.parametrize("regex", ["gated", "slow gated"])
def test_what_several_ask_for_at_once_is_compiled_once(crowd, regex):
    """Whoever comes while it is being compiled waits for that."""
    for number in range(20):
        crowd.submit(str(number), regex, client=f"client {number % 5}")
    crowd.grammars.gate.release(2)

    assert sorted(crowd.next() for _ in range(20)) == sorted(map(str, range(20)))
    tiers = 3 if "slow" in regex else 1
    assert [crowd.grammars.next() for _ in range(tiers)] == [regex] * tiers
    assert crowd.grammars.log.empty()


def test_what_cannot_be_compiled_ends_all_who_asked_for_it_and_nobody_else(crowd):
    """In their own words' name."""
    for number in range(4):
        crowd.submit(str(number), "slow wrong gated")
    crowd.submit("fine", "x")
    crowd.grammars.gate.release(9)

    errors = [crowd.told.get(timeout=PATIENCE).error for _ in range(4)]
    assert {(error.code, error.message) for error in errors} == {
        ("invalid_request", "structured_outputs.regex: it is wrong")
    }
    assert crowd.next() == "fine" and len(crowd.open_requests) == 1


@pytest.mark.parametrize(("regex", "code"), [("short", "overloaded"), ("broken", "internal")])
def test_a_fault_of_ours_ends_the_request_that_met_it(stage, regex, code):
    """Who waited for the same has its own try, and the next request is served."""
    stage.submit("gate", "gated")
    for number in range(3):
        stage.submit(str(number), regex, client="abc"[number])
    stage.submit("fine", "x")
    stage.grammars.gate.release()

    errors = [stage.told.get(timeout=PATIENCE).error for _ in range(3)]
    assert {error.code for error in errors} == {code}
    assert {stage.next(), stage.next()} == {"gate", "fine"}


def test_an_abort_of_the_one_that_others_wait_for_leaves_them_served(crowd):
    """It is not compiled for who is gone, and the others come again."""
    first = crowd.submit("first", "slow gated")
    assert crowd.grammars.next() == "slow gated"
    crowd.submit("second", "slow gated")
    first.aborted = True
    crowd.grammars.gate.release(9)

    assert {crowd.next(), crowd.next()} == {"first", "second"}


def test_tokens_that_take_too_long_to_tell_again_are_told_in_a_higher_tier(stage):
    """The constraint then knows what comes behind them, and the engine is to look."""
    stage.submit("going on", "x", tokens=(1, 2))

    (sequence,) = stage.admitted.get(timeout=PATIENCE).sequences
    assert sequence.constraint[2] == [1, 2] and sequence.awaits_mask
