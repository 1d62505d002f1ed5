"""The parser of the command line, subcommands, and numbers on a command line."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ipc.commands.vllm_flags import vllm_hint, vllm_value_hint


class Parser(argparse.ArgumentParser):
    """Names what is near a misspelt flag or command, and leaves the list of all to ``--help``."""

    _is_parsing = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing may be unknown: each subcommand's parser is called for its own arguments.

        Flags may stand between them: before Python 3.13 an argument that can be left out counted as
        left out where a flag came first.
        """
        if self._is_parsing:
            return super().parse_known_args(args, namespace)
        if self._subparsers is not None and args and args[0].startswith("-"):
            self._refuse(args[:1])  # which argparse would only do if a command followed
        parse = super().parse_known_args if self._subparsers is not None else super().parse_known_intermixed_args
        self._is_parsing = True
        try:
            found, unknown = parse(args, namespace)
        finally:
            self._is_parsing = False
        self._refuse(unknown)
        return found, unknown

    def _refuse(self, arguments: Sequence[str]) -> None:
        """Exit, unless there are none but flags that are known."""
        names = [argument.partition("=")[0] for argument in arguments]
        flags = self._option_string_actions
        if all(name in flags for name in names):
            return
        known = {*flags, *(action.metavar for action in self._actions if isinstance(action.metavar, str))}
        hints = [hint for name in names if (hint := vllm_hint(name, known))]
        near = [one for name in names if name.startswith("--") for one in _near(name, flags)]
        more = f"; {'; '.join(hints)}" if hints else _question(near)
        if not more and "PROMPT" in known and not any(name.startswith("-") for name in names):
            more = "; a prompt of several words is one in quotes"
        self.error(f"unrecognized arguments: {' '.join(arguments)}{more}")

    def error(self, message: str) -> NoReturn:
        """Exit with 2, saying why."""
        print(f"usage: {self.prog} ...; `{self.prog} --help` lists what it takes", file=sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = _question(_near(str(value), choices)) or f" (choose from {', '.join(choices)})"
            hint = vllm_value_hint(action.option_strings, value)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}{hint}")


def _near(name: str, known: Iterable[str]) -> list[str]:
    known = list(known)
    return [one for one in known if one.startswith(name)][:3] or difflib.get_close_matches(name, known, 1, cutoff=0.7)


def _question(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


class ShowVersion(argparse.Action):
    """Prints the installed version of oDriver and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> NoReturn:
        """The flag was given."""
        from importlib.metadata import version

        del arguments
        print(f"odriver {version('odriver')}")
        parser.exit()


def add_command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A subcommand. Options that are not given are left out, so that defaults hold."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    return parser


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a command that has none."""


def seconds(text: str) -> float:
    """Above 0, and less than a day."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return number


def timeout(text: str) -> float:
    """0 or more seconds; inf is no limit."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, or inf, not {text!r}")
    return number


def count(text: str) -> int:
    """1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, not {text!r}")
    return int(text)


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {text!r}")
    return int(text)
