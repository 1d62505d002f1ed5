"""``odriver adapters``: which adapters a daemon has beside its model."""

import argparse
import json
from typing import Any

from ipc.commands import which_daemon
from ipc.commands.arguments import add_command
from ipc.control_client import ControlClient
from ipc.wire.escaping import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of load, unload and list."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    load = add_command(commands, "load", "load an adapter, or another version in its place")
    _add_name(load, "what requests call it")
    load.add_argument(
        "path", nargs="?", default=None, metavar="PATH", help="below the daemon's --adapter-root (default: NAME)"
    )
    load.add_argument("--pin", action="store_true", default=False, help="never evict it to load others")
    unload = add_command(commands, "unload", "refuse further requests with an adapter; open ones go on")
    _add_name(unload, "of the adapter")
    listed = add_command(commands, "list", "show the adapters that are loaded")
    listed.add_argument("--json", dest="as_json", action="store_true", default=False, help="as JSON instead of a table")
    for command, run_it in ((load, _load), (unload, _unload), (listed, _list)):
        which_daemon.add_arguments(command)
        command.set_defaults(adapters_command=run_it)


def run(options: dict[str, Any]) -> int:
    """One of them; the exit code."""
    command = options.pop("adapters_command")
    address, key = which_daemon.take(options)
    with ControlClient(address, key=key, wait=False) as control:
        command(control, **options)
    return 0


def _add_name(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("name", metavar="NAME", help=what)


def _load(control: ControlClient, name: str, path: str | None, *, pin: bool) -> None:
    write(control.load_adapter(name, path, pin=pin))


def _unload(control: ControlClient, name: str) -> None:
    write(control.unload_adapter(name))


def _list(control: ControlClient, *, as_json: bool) -> None:
    rows = control.adapters()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        from ipc.commands.operators.listings import show_adapters

        show_adapters(rows)
