"""Grammars and their processes: how they begin, and that they end."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import build_byte_level, write_tokenizer

from driver.errors import DriverStopped, InternalError, InvalidRequest
from driver.grammar_jobs import grammar_job
from driver.grammars import GrammarConstraint, Grammars
from driver.json_schema import without_additional_properties
from driver.tokenizer import HuggingFaceTokenizer
from engine.awaited_masks import select
from engine.config import ServingLimits
from engine.structured_outputs import StructuredOutputsParams

ROOT = Path(__file__).parent.parent
PATIENCE = 60
LIMITS = ServingLimits(max_model_len=64, vocab_size=410, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As a model directory has it."""
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), build_byte_level()))


@pytest.fixture
def grammars(tokenizer):
    """Grammars that are ended with the test."""
    grammars = Grammars(tokenizer, LIMITS)
    yield grammars
    grammars.stop()
    grammars.close()


def allowed(constraint: GrammarConstraint) -> list[int]:
    """The tokens that its mask has."""
    return np.flatnonzero(np.unpackbits(np.array(constraint.mask).view(np.uint8), bitorder="little")).tolist()


def advance(constraint: GrammarConstraint, token_id: int) -> None:
    """One token, and wait for the answer."""
    constraint.advance(token_id)
    assert select.select([constraint], [], [], PATIENCE)[0] and constraint.hear()


def wait_for_end(constraint: GrammarConstraint) -> None:
    """Until nobody is at the other end."""
    assert select.select([constraint], [], [], PATIENCE)[0] and constraint.hear() and constraint.error is not None


def test_several_sequences_follow_one_grammar_each_for_itself(grammars, tokenizer):
    """Compiled once, they begin alike, and one knows nothing of the other's tokens."""
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")

    left, right = grammars.compile(StructuredOutputsParams(regex="(ab|ba)+"), count=2)
    assert allowed(left) == allowed(right)
    advance(left, a)
    advance(right, b)

    assert allowed(left) == [b] and a in allowed(right) and b not in allowed(right)


def test_ids_that_no_tokenizer_knows_are_never_allowed(grammars):
    """A vocabulary that is padded to a round size."""
    (any_text,) = grammars.compile(StructuredOutputsParams(regex="(.|\n)*"))

    assert max(allowed(any_text)) < build_byte_level().get_vocab_size() and len(any_text.mask) == 13


def test_a_model_without_an_end_ends_where_its_text_is_complete(tokenizer):
    """No token says so, and none is needed."""
    grammars = Grammars(tokenizer, ServingLimits(64, 410, ()))
    (a,) = tokenizer.encode("a")

    (constraint,) = grammars.compile(StructuredOutputsParams(regex="a"))
    assert allowed(constraint) == [a]
    advance(constraint, a)

    assert constraint.complete
    with pytest.raises(InvalidRequest, match="no text but the empty one"):
        grammars.compile(StructuredOutputsParams(regex="()"))
    grammars.stop()
    grammars.close()


def test_a_token_that_the_grammar_does_not_allow_is_an_error(grammars, tokenizer):
    """Nothing goes on from there."""
    (constraint,) = grammars.compile(StructuredOutputsParams(regex="[ab]+"))

    advance(constraint, tokenizer.encode("x")[0])

    assert constraint.error is not None and constraint.error.startswith("structured_outputs: ")


def test_the_first_process_is_started_again_when_it_has_died(grammars):
    """By whoever needs it next; grammars that are being followed are processes of their own."""
    (before,) = grammars.compile(StructuredOutputsParams(regex="a"))
    grammars._process._process.kill()
    grammars._process._process.wait()

    (after,) = grammars.compile(StructuredOutputsParams(regex="a"))

    assert allowed(before) == allowed(after)
    assert not before.hear() and before.error is None


def test_a_tokenizer_that_cannot_be_followed_is_our_error(tokenizer, monkeypatch, capfd):
    """The client has done nothing wrong."""
    monkeypatch.setattr(tokenizer, "definition", lambda: "{}")
    grammars = Grammars(tokenizer, LIMITS)

    with pytest.raises(InternalError, match="the daemon's log says why"):
        grammars.compile(StructuredOutputsParams(regex="a"))
    grammars.stop()
    assert "Traceback" in capfd.readouterr().err


def test_stopped_nothing_is_compiled_and_what_is_followed_ends(grammars):
    """Who waits for an answer hears that there will be none."""
    (constraint,) = grammars.compile(StructuredOutputsParams(regex="a"))

    grammars.stop()

    wait_for_end(constraint)
    with pytest.raises(DriverStopped):
        grammars.compile(StructuredOutputsParams(regex="a"))


def test_processes_end_with_the_daemon_however_it_ends(tmp_path):
    """Killed, it can close nothing itself (an ancestor left children behind)."""
    write_tokenizer(tmp_path / "tokenizer", build_byte_level())
    program = f"""
import os
from pathlib import Path
from driver.grammars import Grammars
from driver.tokenizer import HuggingFaceTokenizer
from engine.config import ServingLimits
from engine.structured_outputs import StructuredOutputsParams

grammars = Grammars(HuggingFaceTokenizer(Path({str(tmp_path / "tokenizer")!r})), ServingLimits(64, 410, (0,)))
constraints = grammars.compile(StructuredOutputsParams(regex="a+"), count=3)
os.kill(os.getpid(), 9)
"""
    ours, theirs = os.pipe()  # all who descend from the program hold the other end
    with os.fdopen(ours, "rb") as ours_file:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=theirs, check=False)
        os.close(theirs)

        assert done.returncode == -9
        assert select.select([ours_file], [], [], PATIENCE)[0] and ours_file.read() == b""


@pytest.mark.exhaustive
def test_a_grammar_that_takes_too_long_is_refused(grammars):
    """An intersection that would take minutes; another is compiled meanwhile."""
    endless = "start: R\nR: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(40))

    with pytest.raises(InvalidRequest, match="cannot be compiled within 5 seconds"):
        grammars.compile(StructuredOutputsParams(grammar=endless))


def test_a_search_for_what_is_not_honoured_takes_no_time():
    """Tens of thousands of brackets are looked at once."""
    job = grammar_job(StructuredOutputsParams(grammar="start: " + "[" * 60000), hide_eos=False)

    assert job.kind == "lark"


def test_only_schemas_are_closed():
    """Not what merely looks like one: a property called properties, a constant."""
    looks_like_one = {"properties": {"x": 1}}
    schema = {
        "type": "object",
        "properties": {
            "properties": {"properties": {"y": True}},
            "open": {"properties": {}, "additionalProperties": True},
        },
        "items": [{"patternProperties": {}}],
        "anyOf": [{"not": {"properties": {}}}, {"const": looks_like_one, "enum": [looks_like_one]}],
    }

    assert without_additional_properties(schema) == {
        "type": "object",
        "properties": {
            "properties": {"properties": {"y": True}, "additionalProperties": False},
            "open": {"properties": {}, "additionalProperties": True},
        },
        "items": [{"patternProperties": {}, "additionalProperties": False}],
        "anyOf": [
            {"not": {"properties": {}, "additionalProperties": False}},
            {"const": looks_like_one, "enum": [looks_like_one]},
        ],
        "additionalProperties": False,
    }
