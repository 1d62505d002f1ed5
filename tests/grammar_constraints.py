"""Constraints of real grammars, for tests: how they begin, and what one does with them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
from fake_driver import PATIENCE

from driver.grammars.compiler import LAST, GrammarCompiler
from driver.grammars.constraint import GrammarConstraint
from driver.grammars.matcher_pool import Allowance
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.request_limits import ServingLimits
from engine.scheduling.constraints.awaited_masks import select
from engine.structured_outputs import StructuredOutputsParams

LIMITS = ServingLimits(max_model_len=64, vocab_size=410, eos_token_ids=(0,))
ENDLESS = "start: R\nR: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(40))
"""Would take minutes to compile."""


@contextmanager
def running(tokenizer: HuggingFaceTokenizer, limits: ServingLimits = LIMITS) -> Iterator[GrammarCompiler]:
    """Grammars that are ended in the end."""
    grammars = GrammarCompiler(tokenizer, limits)
    yield grammars
    grammars.stop()
    grammars.close()


def begin(
    grammars: GrammarCompiler, count: int = 1, *, heavy: bool = False, token_ids: tuple[int, ...] = (), **form: str
) -> list[GrammarConstraint]:
    """So many samples of one request for a form."""
    job = grammars.job(StructuredOutputsParams(**form))
    grammar = grammars.find(job) or grammars.compile(job, 0) or grammars.compile(job, LAST)
    assert grammar is not None
    allowance = Allowance(heavy=heavy)
    constraints = [grammars.constraint(grammar, allowance, list(token_ids), LAST, None, None) for _ in range(count)]
    return [constraint for constraint in constraints if constraint is not None]


def allowed(constraint: GrammarConstraint) -> list[int]:
    """The tokens that its mask has."""
    return np.flatnonzero(np.unpackbits(np.array(constraint.mask).view(np.uint8), bitorder="little")).tolist()


def hear(constraint: GrammarConstraint) -> None:
    """Wait for the answer, as the engine does: a while at a time."""
    for _ in range(20 * PATIENCE):
        if constraint.hear(set()):
            return
        select.select([constraint], [], [], 0.05)
    raise AssertionError("there is no answer")


def advance(constraint: GrammarConstraint, *token_ids: int) -> None:
    """Some tokens, each with its answer."""
    for token_id in token_ids:
        constraint.advance(token_id)
        hear(constraint)


def worker_of(constraint: GrammarConstraint) -> int:
    """The id of the process behind it."""
    assert constraint._worker is not None and constraint._worker.process_id is not None
    return constraint._worker.process_id


def first_processes() -> list[psutil.Process]:
    """Those that the processes of grammars are forked from; this one may have other children, of tests before."""
    return [child for child in psutil.Process().children() if "grammar" in "".join(_command(child))]


def children() -> list[psutil.Process]:
    """All processes of grammars that descend from this one."""
    processes = []
    for first in first_processes():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            processes += [first, *first.children(recursive=True)]
    return processes


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []
