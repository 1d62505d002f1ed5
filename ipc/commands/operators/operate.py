"""The commands of ``odriver`` that steer a daemon, over its control socket."""

import argparse
import json
import sys
import time
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from driver.request import RequestOrder, UpdateMode
from ipc.commands import which_daemon
from ipc.commands.arguments import count, no_arguments, seconds, timeout
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.service.configuration import LOG_LEVELS
from ipc.wire.escaping import one_line, write


class Command(NamedTuple):
    """``add_arguments`` adds its own; ``run`` gets them by name, and returns the exit code."""

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[ControlClient, dict[str, Any]], int | None]
    what: str


def run(command: Command, options: dict[str, Any]) -> int:
    """Connect, do one of COMMANDS, and return the exit code."""
    address, key = which_daemon.take(options)
    with ControlClient(address, key=key, wait=False) as control:
        return command.run(control, options) or 0


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _status(control: ControlClient, options: dict[str, Any]) -> None:
    status = control.status()
    if options["json"]:
        print(json.dumps(status, indent=2))
    else:
        from ipc.commands.operators.listings import show_status

        show_status(status)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds from a look to the next (default: 1)"
    )
    parser.add_argument("--once", action="store_true", default=False, help="look for one interval, print, and end")


def _top(control: ControlClient, options: dict[str, Any]) -> None:
    from rich.console import Console

    from ipc.commands.operators import top

    top.run(control.status, options["interval"], once=options["once"], console=Console())


def _requests_arguments(parser: argparse.ArgumentParser) -> None:
    add, orders = parser.add_argument, typing.get_args(RequestOrder)
    add("--sort", choices=orders, default="age", help="oldest, most tokens or fastest first, or by client")
    add("--limit", type=count, default=None, metavar="N", help=f"at most so many (default: {MOST_ROWS} in a table)")
    add("--client", default=None, metavar="NAME", help="of this client alone")
    add("--json", action="store_true", default=False, help="as JSON instead of a table")
    add("-q", "--quiet", action="store_true", default=False, help="the ids alone, one a line, as `abort` takes them")


def _requests(control: ControlClient, options: dict[str, Any]) -> None:
    is_table = not (options["json"] or options["quiet"])
    limit = MOST_ROWS if is_table and options["limit"] is None else options["limit"]
    rows, total = control.requests(options["sort"], limit, options["client"])
    if options["quiet"]:
        for row in rows:
            write(row["id"])
    elif options["json"]:
        print(json.dumps({"requests": rows, "total": total}, indent=2))
    else:
        from ipc.commands.operators.listings import show_requests

        show_requests(rows, total)


def _abort_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", nargs="+", metavar="ID", help="what `odriver requests` and the log call it")


def _abort(control: ControlClient, options: dict[str, Any]) -> int:
    """Abort each; 1 if one is not open."""
    code = 0
    for request_id in options["request_id"]:
        try:
            write(control.abort(request_id))
        except RequestFailed as error:
            print(f"odriver: {one_line(str(error))}", file=sys.stderr)
            code = 1
    return code


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=timeout, metavar="S", help="seconds to finish in, or inf (default: the daemon's)"
    )


def _level_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("level", choices=LOG_LEVELS, help="lowest level that is logged")


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


def _sleep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level", type=int, choices=(1, 2), default=1, help="2 gives back the memory of the weights too (default: 1)"
    )


def _mode_arguments(parser: argparse.ArgumentParser, default: UpdateMode) -> None:
    parser.add_argument(
        "--mode",
        choices=typing.get_args(UpdateMode),
        default=default,
        help=f"open requests are kept and go on later, end first, or are ended (default: {default})",
    )
    parser.add_argument(
        "--keep-cache", action="store_true", default=False, help="compute nothing again that is computed"
    )


def _pause_arguments(parser: argparse.ArgumentParser) -> None:
    _mode_arguments(parser, "abort")


def _update_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="directory with all weights, below the daemon's --weights-root")
    _mode_arguments(parser, "keep")
    parser.add_argument("--name", default="", help="what status and log call these weights")


def _update_weights(control: ControlClient, options: dict[str, Any]) -> None:
    version = control.update_weights(
        options["path"], mode=options["mode"], keep_cache=options["keep_cache"], name=options["name"]
    )
    write(f"version {version} of the weights is served")


MOST_ROWS = 50
"""Rows of a table of requests, unless more are asked for."""

COMMANDS = [
    Command("status", _status_arguments, _status, "show how the daemon is"),
    Command("top", _top_arguments, _top, "watch the daemon at work"),
    Command("requests", _requests_arguments, _requests, "list the open requests, of all clients"),
    Command("abort", _abort_arguments, _abort, "end requests, of whatever client"),
    Command(
        "drain",
        _drain_arguments,
        lambda control, options: write(control.drain(options.get("timeout"))),
        "have the daemon finish what it has, take nothing new, and end",
    ),
    Command(
        "sleep",
        _sleep_arguments,
        lambda control, options: write(control.sleep(options["level"])),
        "have the daemon finish what it has, and give back the memory of its pages until it is woken",
    ),
    Command("wake", no_arguments, lambda control, _: write(control.wake()), "have a sleeping daemon serve again"),
    Command(
        "pause",
        _pause_arguments,
        lambda control, options: write(control.pause(options["mode"], clear_cache=not options["keep_cache"])),
        "have the daemon compute nothing until it is resumed",
    ),
    Command("resume", no_arguments, lambda control, _: write(control.resume()), "have a paused daemon go on"),
    Command(
        "update-weights",
        _update_arguments,
        _update_weights,
        "have the daemon serve other weights of its model, from one step to the next",
    ),
    Command(
        "reload",
        no_arguments,
        lambda control, _: write(control.reload()),
        "have the daemon read its configuration and its keys again",
    ),
    Command(
        "reset-prefix-cache",
        no_arguments,
        lambda control, _: write(control.reset_prefix_cache()),
        "have the daemon forget the prompts that it keeps computed",
    ),
    Command(
        "log-level",
        _level_arguments,
        lambda control, options: write(control.set_log_level(options["level"])),
        "change what the daemon logs, until it ends",
    ),
    Command("profile", _profile_arguments, _profile, "have the daemon trace what its device and host do"),
]
