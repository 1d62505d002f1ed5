"""The processes that grammars run in: what their end means for whom, what they cost, and that they end."""

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from grammar_constraints import (
    ENDLESS,
    LIMITS,
    PATIENCE,
    advance,
    allowed,
    begin,
    children,
    first_processes,
    hear,
    running,
    worker_of,
)
from msgspec import structs
from test_scheduler import build_sequence
from tokenizer_files import build_byte_level, write_tokenizer

from driver.errors import DriverError, DriverStopped, Overloaded
from driver.grammars import constraint as grammar_constraint
from driver.grammars.compiler import LAST
from driver.grammars.matcher_pool import Allowance
from driver.grammars.workers import Worker
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.scheduling.constraints.awaited_masks import AwaitedMasks
from engine.structured_outputs import StructuredOutputsParams

ROOT = Path(__file__).parent.parent
SHORTAGES = [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM]


@pytest.fixture
def a(tokenizer: HuggingFaceTokenizer) -> int:
    """The token of an a."""
    return tokenizer.encode("a")[0]


@pytest.fixture
def b(tokenizer: HuggingFaceTokenizer) -> int:
    """The token of a b."""
    return tokenizer.encode("b")[0]


@pytest.mark.parametrize("victim", ["workers", "first process"])
def test_who_followed_in_a_process_that_is_killed_goes_on_in_another(grammars, a, b, victim):
    """With or without an answer outstanding, and all as if nothing had been."""
    constraints = [begin(grammars, regex=f"(ab){{{9 + index}}}")[0] for index in range(6)]
    for constraint in constraints:
        advance(constraint, a)
    for constraint in constraints[:3]:
        constraint.advance(b)
    first = first_processes()

    for process in first if victim == "first process" else first[0].children():
        process.kill()
    for constraint in constraints[3:]:
        constraint.advance(b)

    for constraint in constraints:
        hear(constraint)
        assert constraint.error is None and allowed(constraint) == [a]
        advance(constraint, a)
        assert allowed(constraint) == [b]


@pytest.mark.parametrize("letter", "xyz")
@pytest.mark.parametrize("heavy", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_what_breaks_its_worker_ends_its_own_request_and_nobody_elses(
    tokenizer, a, b, letter, heavy, monkeypatch, capfd
):
    """Crash, no end or no memory: each sample of that request ends, and all that were followed beside it go on."""
    x, y, z = (tokenizer.encode(text)[0] for text in "xyz")
    program = f"import sys; sys.path[:] = {{path!r}}; from crashing_grammars import main; main({x}, {y}, {z})"
    monkeypatch.setattr("driver.grammars.workers.PROGRAM", program)
    with running(tokenizer) as grammars:
        guilty = begin(grammars, 4, heavy=heavy, regex="(ab)+[xyz]*")
        innocent = [begin(grammars, heavy=heavy, regex=f"(ab){{{9 + index}}}")[0] for index in range(6)]
        for constraint in [*guilty, *innocent]:
            advance(constraint, a, b)

        for constraint in guilty[:3]:
            constraint.advance(tokenizer.encode(letter)[0])
        for constraint in innocent:
            constraint.advance(a)
        for constraint in [*guilty[:3], *innocent]:
            hear(constraint)
        guilty[3].suspend()
        advance(guilty[3], a)

        why = {constraint.error for constraint in guilty}
        assert len(why) == 1 and "make it simpler" in str(why.pop())
        for constraint in innocent:
            assert constraint.error is None and not constraint.internal and allowed(constraint) == [b]
            advance(constraint, b)
            assert allowed(constraint) == [a]
    capfd.readouterr()  # what the broken ones have to say


def test_what_breaks_its_worker_ahead_of_the_text_does_not_end_the_text(tokenizer, monkeypatch, capfd):
    """A guess may lead where a grammar breaks and the text never comes; without drafts it would not break there."""
    text, (x,) = [tokenizer.encode(letter)[0] for letter in "abcd"], tokenizer.encode("x")
    program = f"import sys; sys.path[:] = {{path!r}}; from crashing_grammars import main; main({x}, {x}, {x})"
    monkeypatch.setattr("driver.grammars.workers.PROGRAM", program)
    limits = structs.replace(LIMITS, num_speculative_tokens=3, prompt_lookup=(1, 1))
    with running(tokenizer, limits) as grammars:
        grammar = grammars.compile(grammars.job(StructuredOutputsParams(regex="[a-z]{9}")), LAST)
        assert grammar is not None
        prompt = grammars.index([token_id for letter in text for token_id in (letter, x)])
        constraint = grammars.constraint(grammar, Allowance(heavy=False), [], LAST, None, prompt)
        assert constraint is not None

        advance(constraint, *text)

        assert constraint.error is None and text[0] in allowed(constraint)
        assert constraint.allowance.ended_workers
        constraint.close()
    capfd.readouterr()  # what the broken ones have to say


def test_a_grammar_that_ends_a_quick_worker_goes_among_the_heavy(grammars, a, b):
    """It has a second chance there, and the quick ones are spared it."""
    suspect, quick = begin(grammars, regex="(ab)+")[0], begin(grammars, regex="(ab)+")[0]
    advance(suspect, a)
    os.kill(worker_of(suspect), signal.SIGSTOP)
    suspect.advance(b)
    os.kill(worker_of(suspect), signal.SIGKILL)
    hear(suspect)

    advance(suspect, a)
    advance(quick, a)

    assert allowed(suspect) == allowed(quick) == [b] and worker_of(suspect) != worker_of(quick)
    assert suspect.allowance.heavy and not quick.allowance.heavy


def test_kills_from_outside_are_nobodys_fault_until_there_are_many(grammars, a, b, monkeypatch):
    """Though always at the same place; when they come to no end it ends, as the system kills for want of memory, too."""
    monkeypatch.setattr("driver.grammars.matcher_pool.ENDING_TIMEOUT", PATIENCE)
    (constraint,) = begin(grammars, heavy=True, regex="(ab)+")
    advance(constraint, a)

    def kill(times: int) -> None:
        for _ in range(times):
            os.kill(worker_of(constraint), signal.SIGSTOP)
            constraint.advance(b)
            os.kill(worker_of(constraint), signal.SIGKILL)
            hear(constraint)
            if constraint.error is None:
                advance(constraint, a)

    kill(7)
    assert constraint.error is None and allowed(constraint) == [b]
    kill(1)
    assert constraint.error is not None


def test_what_is_slow_goes_among_the_heavy_and_may_not_go_on_for_ever(grammars, a, b):
    """Measured by processor time beyond a little a token; it is right there, too."""
    slow, quick = begin(grammars, regex="(ab)+")[0], begin(grammars, regex="(ab)+")[0]
    for constraint in (slow, quick):
        advance(constraint, a)

    slow.allowance.charge(0.2, 0)
    for constraint in (slow, quick):
        advance(constraint, b, a)
    assert worker_of(slow) != worker_of(quick) and allowed(slow) == allowed(quick) == [b]
    slow.allowance.charge(1e9, 0)
    advance(slow, b, a)

    assert slow.error is not None and quick.error is None


def test_a_worker_that_does_not_read_holds_nobody_up(grammars, a, b):
    """Telling it of tokens returns at once, and more than a socket holds is told when it goes on."""
    (constraint,) = begin(grammars, heavy=True, regex="(ab)+")
    advance(constraint, a)
    others = begin(grammars, 40, heavy=True, regex="|".join(f"x{number:05}" for number in range(7000)) + "|(ab)+")

    os.kill(worker_of(constraint), signal.SIGSTOP)
    for other in others:
        other.advance(a)
    assert not any(other.hear(set()) for other in others)
    os.kill(worker_of(constraint), signal.SIGCONT)

    for other in others:
        hear(other)
        assert allowed(other) == [b]
        other.close()


def test_a_worker_is_read_once_for_all_that_wait_for_it(grammars, a, b, monkeypatch):
    """However many they are, whether or not it has answered; and each finds its own answer."""
    constraints = begin(grammars, 100, heavy=True, regex="(ab)+")
    for constraint in constraints:
        advance(constraint, a)
    process_id, reads, receive = worker_of(constraints[0]), [], Worker.receive
    monkeypatch.setattr(Worker, "receive", lambda worker: reads.append(worker) or receive(worker))
    masks = AwaitedMasks()

    os.kill(process_id, signal.SIGSTOP)
    for constraint in constraints:
        constraint.advance(b)
        sequence = build_sequence("a", 1, 9)
        sequence.constraint = constraint
        masks.add(sequence)
    answered = masks.hear(in_flight=0.0)
    assert answered == [] and len(reads) == 1
    os.kill(process_id, signal.SIGCONT)
    rounds = 1
    while masks:
        masks.wait()
        answered += masks.hear(in_flight=0.0)
        rounds += 1

    assert {sequence.constraint for sequence in answered} == set(constraints) and len(answered) == 100
    assert len(reads) <= rounds and all(a in allowed(constraint) for constraint in constraints)


@pytest.mark.parametrize("number", SHORTAGES)
@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_what_the_system_has_no_more_of_is_overload(grammars, monkeypatch, number, call):
    """Nothing half-made is left, and the next request is served."""
    files = len(os.listdir("/proc/self/fd"))

    with monkeypatch.context() as patch, pytest.raises(Overloaded, match="try again later"):
        patch.setattr(f"driver.grammars.workers.{call}", refusing(number))
        begin(grammars, regex="a")

    assert len(os.listdir("/proc/self/fd")) <= files and not children()
    assert begin(grammars, regex="a")


def refusing(number: int):
    """A call that always fails so."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_worker_for_a_sequence_that_runs_is_waited_for(grammars, a, b, monkeypatch):
    """Where none can be had its mask is late; should that take too long, the error is not the client's."""
    (constraint,) = begin(grammars, regex="(ab)+")
    advance(constraint, a)

    with monkeypatch.context() as patch:
        patch.setattr("driver.grammars.workers.socket.socketpair", refusing(errno.EMFILE))
        os.kill(worker_of(constraint), signal.SIGKILL)
        select.select([constraint], [], [], PATIENCE)
        constraint.advance(b)
        assert not constraint.hear(set()) and not constraint.hear(set())
    hear(constraint)
    assert a in allowed(constraint)

    with monkeypatch.context() as patch:
        patch.setattr("driver.grammars.workers.socket.socketpair", refusing(errno.EMFILE))
        patch.setattr(grammar_constraint, "WORKER_PATIENCE", 0)
        os.kill(worker_of(constraint), signal.SIGKILL)
        constraint.advance(a)
        hear(constraint)
    assert constraint.error is not None and constraint.internal


def test_stopped_nothing_is_compiled_and_what_is_followed_ends(grammars, a, b, monkeypatch):
    """Who waits for an answer hears that there will be none."""
    monkeypatch.setattr(grammar_constraint, "WORKER_PATIENCE", 0)
    (constraint,) = begin(grammars, regex="(ab)+")
    advance(constraint, a)

    grammars.stop()
    constraint.advance(b)

    hear(constraint)
    assert constraint.error is not None
    with pytest.raises(DriverStopped):
        begin(grammars, regex="b")
    assert not children()


def test_who_waits_for_a_grammar_hears_of_the_end(grammars):
    """A thread that has one compiled is not left waiting."""
    begin(grammars, regex="a")
    before, ends = len(children()), []

    def compile_endless() -> None:
        try:
            grammars.compile(grammars.job(StructuredOutputsParams(grammar=ENDLESS)), LAST)
        except DriverError as error:
            ends.append(type(error))

    thread = threading.Thread(target=compile_endless)
    thread.start()
    while len(children()) == before:
        assert thread.is_alive()
    grammars.stop()
    thread.join(PATIENCE)

    assert ends == [DriverStopped]


def test_processes_are_few_and_modest_and_end_with_the_daemon_however_it_ends(tmp_path):
    """Killed, it can close nothing itself (an ancestor left children behind): also one in the midst of work goes."""
    write_tokenizer(tmp_path / "tokenizer", build_byte_level())
    program = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from driver.grammars.compiler import LAST, GrammarCompiler
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.structured_outputs import StructuredOutputsParams
from grammar_constraints import *

grammars = GrammarCompiler(HuggingFaceTokenizer(Path({str(tmp_path / "tokenizer")!r})), LIMITS)
constraints = begin(grammars, 500, regex="a+")
for constraint in constraints:
    constraint.advance(3)
endless = grammars.job(StructuredOutputsParams(grammar=ENDLESS))
threading.Thread(target=grammars.compile, args=(endless, LAST), daemon=True).start()
hear(constraints[-1])
while len(children()) < 5:
    pass
facts = {{(p.nice(), Path(f"/proc/{{p.pid}}/oom_score_adj").read_text().strip()) for p in children()}}
print(len(children()), facts, flush=True)
os.kill(os.getpid(), 9)
"""
    ours, theirs = os.pipe()  # all who descend from the program hold the other end
    with os.fdopen(ours, "rb") as ours_file:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=theirs, check=False)
        os.close(theirs)

        assert done.returncode == -signal.SIGKILL
        assert select.select([ours_file], [], [], PATIENCE)[0]
        nice = min(os.nice(0) + 10, 19)
        assert ours_file.read().decode() == f"5 {{({nice}, '1000')}}\n"
