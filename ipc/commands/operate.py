"""The commands of ``odriver`` that steer a daemon, over its control socket."""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ipc.commands import which_daemon
from ipc.commands.arguments import seconds
from ipc.control_client import ControlClient
from ipc.service.configuration import LOG_LEVELS
from ipc.wire.escaping import write


class Command(NamedTuple):
    """``add_arguments`` adds its own; ``run`` gets them, by name."""

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[ControlClient, dict[str, Any]], None]
    what: str


def run(command: Command, options: dict[str, Any]) -> int:
    """Connect, do one of COMMANDS, and return the exit code."""
    address, key = which_daemon.take(options)
    with ControlClient(address, key=key) as control:
        command.run(control, options)
    return 0


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _status(control: ControlClient, options: dict[str, Any]) -> None:
    status = control.status()
    if options["json"]:
        print(json.dumps(status, indent=2))
    else:
        from ipc.commands.listings import show_status

        show_status(status)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds from a look to the next (default: 1)"
    )
    parser.add_argument("--once", action="store_true", default=False, help="look for one interval, print, and end")


def _top(control: ControlClient, options: dict[str, Any]) -> None:
    from rich.console import Console

    from ipc.commands import top

    top.run(control.status, options["interval"], once=options["once"], console=Console())


def _abort_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID", help="what the daemon's log calls it")


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to finish in, or inf (default: the daemon's)"
    )


def _level_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("level", choices=LOG_LEVELS, help="the least that is logged")


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["start", "stop"], help="begin a trace, or end it and write it")
    parser.add_argument(
        "name",
        nargs="?",
        default=None,
        metavar="NAME",
        help="with start: of the directory that it is written to, for xprof or TensorBoard, among the daemon's "
        "--profile-directory (default: date and time)",
    )


def _profile(control: ControlClient, options: dict[str, Any]) -> None:
    if options["action"] == "start":
        directory = control.start_profile(options["name"] or time.strftime("%Y%m%d-%H%M%S"))
        write(f"profiling; `odriver profile stop` writes {directory}")
    else:
        write(control.stop_profile())


COMMANDS = [
    Command("status", _status_arguments, _status, "show how the daemon is"),
    Command("top", _top_arguments, _top, "watch the daemon at work"),
    Command(
        "abort",
        _abort_arguments,
        lambda control, options: write(control.abort(options["request_id"])),
        "end one request, of whatever client",
    ),
    Command(
        "drain",
        _drain_arguments,
        lambda control, options: write(control.drain(options.get("timeout"))),
        "have the daemon finish what it has, take nothing new, and end",
    ),
    Command(
        "sleep",
        _no_arguments,
        lambda control, _: write(control.sleep()),
        "have the daemon finish what it has, and give back the memory of its pages until it is woken",
    ),
    Command("wake", _no_arguments, lambda control, _: write(control.wake()), "have a sleeping daemon serve again"),
    Command(
        "log-level",
        _level_arguments,
        lambda control, options: write(control.set_log_level(options["level"])),
        "change what the daemon logs, until it ends",
    ),
    Command("profile", _profile_arguments, _profile, "have the daemon trace what its device and host do"),
]
