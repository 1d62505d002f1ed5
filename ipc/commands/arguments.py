"""Subcommands, and numbers on a command line."""

import argparse
from typing import Any


def add_command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A subcommand. Options that are not given are left out, so that defaults hold."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    return parser


def seconds(text: str) -> float:
    """Above 0, and less than a day."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
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
