"""``odriver keys``: which keys may connect to a daemon that asks for keys."""

import argparse
import re
from pathlib import Path
from typing import Any

from engine.request_limits import MAX_PRIORITY
from ipc.commands.arguments import add_command, count
from ipc.service import settings
from ipc.wire import keys

RELOAD = "a running daemon learns of it from `odriver reload`, with a key made with --control; a service from `systemctl reload odriver`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of new, list and revoke."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, what in (
        ("new", _new, "make a key, and authorise it"),
        ("list", _list, "show the keys that are authorised"),
        ("revoke", _revoke, "authorise a key no longer"),
    ):
        command = add_command(commands, name, what)
        add = command.add_argument
        if name != "list":
            add("name", metavar="NAME", help="whose it is: the daemon's log and its quotas call them so")
        if name == "new":
            add("--out", type=Path, metavar="FILE", help="the client's file (default: NAME.key)")
            add("--max-requests", type=count, metavar="N", help="requests open at once (default: no limit)")
            add("--tokens-per-minute", type=count, metavar="N", help="read and generated (default: no limit)")
            add(
                "--adapters",
                type=_names,
                metavar="NAME,...",
                help="adapters that it may use, '*' for all (default: none; with --control all)",
            )
            add(
                "--least-priority",
                type=_priority,
                metavar="-N",
                help="the lowest priority of its requests, which goes before others (default: 0; with --control any)",
            )
            add("--control", action="store_true", help="may use status, abort, drain, sleep, wake and the like")
        add("--keys", type=Path, metavar="DIR", default=None, help="where the daemon has them, unless configured")
        command.set_defaults(keys_command=run)


def run(options: dict[str, Any]) -> int:
    """One of them; the exit code."""
    directory = options.pop("keys") or settings.held({})["keys"].value or keys.default_directory()
    options.pop("keys_command")(directory, **options)
    return 0


def _priority(text: str) -> int:
    if not re.fullmatch(r"0|-[1-9]\d{0,9}", text) or int(text) < -MAX_PRIORITY:
        raise argparse.ArgumentTypeError(f"must be 0, or a number from -{MAX_PRIORITY} to -1, not {text}")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _new(directory: Path, name: str, out: Path | None = None, **limits: int | bool | list[str]) -> None:
    out = out or Path(f"{name}.key")
    keys.new(directory, name, out, **limits)
    print(f"{out} is the key of {name}: give it to them alone; {RELOAD}")


def _list(directory: Path) -> None:
    from ipc.commands.operators.listings import show_keys

    show_keys(keys.authorized(directory))


def _revoke(directory: Path, name: str) -> None:
    keys.revoke(directory, name)
    print(f"{name} may connect no more; {RELOAD}")
