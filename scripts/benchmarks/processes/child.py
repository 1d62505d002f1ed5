"""Work done in another process, so that neither its GIL nor its memory is in the way of what is measured.

A child reads one JSON line per question from stdin and answers each with one line on stdout.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from scripts.benchmarks.figures.figure import MeasurementFailed
from scripts.benchmarks.processes.daemon import environment


class ChildFailed(MeasurementFailed):
    """A child ended instead of answering; it has said why on stderr."""


class Child:
    """``python -m MODULE ARGUMENTS``, from entering to leaving; one thread asks it one thing at a time."""

    def __init__(self, module: str, *arguments: str, python: str | Path = sys.executable) -> None:
        self._command = [str(python), "-m", module, *arguments]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, whatever it is at."""
        self._process.kill()

    def ask(self, question: Any, answer: Any = Any) -> Any:
        """Send a question and wait for its answer, which is converted to the type ``answer``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the next line finds
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{' '.join(self._command)} ended with exit code {self._process.wait()}")
        return msgspec.json.decode(line, type=answer)


def ask_once(module: str, question: Any, answer: Any) -> Any:
    """One question to a child of its own."""
    with Child(module) as child:
        return child.ask(question, answer)


def answer_all(answer: Callable[[Any], Any]) -> None:
    """The other side: answer questions until there are no more."""
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(answer(msgspec.json.decode(line))) + b"\n")
        sys.stdout.buffer.flush()
