"""Whether a shown command is one, by the real parsers. Nothing is run."""

import argparse
import functools
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout

from ipc.commands import cli
from scripts.benchmarks.command_line.arguments import parser as bench_parser
from scripts.documents.pages import ROOT

ASSIGNMENT = re.compile(r"\w+=")
WRAPPERS = ("sudo", "exec", "time")
SHELLS = ("sh", "bash")
SCRIPT_FLAGS = {"--web", "--serve", "--all"}
"""Of scripts/run and scripts/test, which are no Python."""


_of_odriver, _of_bench = functools.cache(cli.parser), functools.cache(bench_parser)


class WrongCommand(Exception):
    """What is wrong with it."""


def check(text: str) -> None:
    """Check every simple command of a line for a shell. Raises WrongCommand."""
    for words in _simple_commands(text):
        program, arguments = words[0], words[1:]
        if program in SHELLS and arguments[:1] == ["-c"]:
            check(arguments[1])
        elif program.rpartition("/")[2] == "odriver":
            _parse(_of_odriver(), arguments)
        elif program == "scripts/run" and arguments[:1] in (["--serve"], ["--web"]):
            _parse(_of_odriver(), ["serve", *arguments[1:]])
        elif program == "scripts/bench":
            _parse(_of_bench(), arguments)
        elif program.startswith("scripts/") and not (ROOT / program).is_file():
            raise WrongCommand(f"there is no {program}")


def flags() -> set[str]:
    """Every flag of a command of this project."""
    parsers = [_of_odriver(), _of_bench()]
    return SCRIPT_FLAGS | {flag for parser in parsers for flag in _flags(parser)}


def subcommand(*names: str) -> argparse.ArgumentParser:
    """The parser of ``odriver NAME ...``. Raises WrongCommand."""
    parser = _of_odriver()
    for name in names:
        choices = _subparsers(parser)
        if name not in choices:
            raise WrongCommand(f"odriver has no command {name!r}")
        parser = choices[name]
    return parser


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Split at pipes, lists and redirections; less variables and what runs another command."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if token and set(token) <= set(lexer.punctuation_chars):
            if words:
                yield words
            words = []
        elif words or not (ASSIGNMENT.match(token) or token in WRAPPERS):
            words.append(token)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            parser.parse_args(arguments)
    except SystemExit as end:
        if end.code:
            raise WrongCommand(said.getvalue().strip().splitlines()[-1]) from end


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(choices, {})


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*map(_flags, _subparsers(parser).values()))
