"""The ``odriver`` command."""

import argparse
import errno
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from driver.errors import shortened
from engine.errors import ConfigurationError
from ipc.commands import gateway_command, plan_command, which_daemon
from ipc.commands.arguments import Parser, ShowVersion, add_command, count, no_arguments, seconds
from ipc.commands.operators import adapters_command, keys_command, operate
from ipc.commands.requests import chat, complete
from ipc.errors import AddressError, KeyFileError, OdriverError
from ipc.service import settings
from ipc.wire.addresses import default_address
from ipc.wire.escaping import LONGEST_LINE, visible

FAILED = 1
INTERRUPTED = 130
"""Exit codes beside 0 and EX_CONFIG. argparse uses 2."""
OF_CONFIGURATION = (ConfigurationError, AddressError, KeyFileError)
"""Errors after which the same command would fail again, as for ``serve``."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of stdout in a file: there is no room, or the disk fails."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    _replace_closed_streams()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # at exit the interpreter would tell of a failure in its own words
    except BrokenPipeError:
        pass  # the reader has enough
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"odriver: the output cannot be written: {error.strerror}", file=sys.stderr)
    # What is left of the output would fail again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _replace_closed_streams() -> None:
    """Python has None for a stream that its starter closed, and the next file would have its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _run(given: Sequence[str]) -> int:
    if not given:
        parser().print_help()
        return 0
    options = vars(parser().parse_args(given))
    run = options.pop("run")
    try:
        return int(run(options))
    except (OdriverError, ConfigurationError) as error:
        print(f"odriver: {visible(shortened(str(error), LONGEST_LINE))}", file=sys.stderr)
        return os.EX_CONFIG if isinstance(error, OF_CONFIGURATION) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def parser() -> Parser:
    """The command line, every subcommand included."""
    command_line = Parser("odriver", description="Serve a language model, and talk to it.", allow_abbrev=False)
    command_line.add_argument(
        "--version", action=ShowVersion, nargs=0, default=argparse.SUPPRESS, help="show oDriver's version and exit"
    )
    commands = command_line.add_subparsers(required=True, metavar="COMMAND")
    for name, add_arguments, run, what in (
        ("serve", settings.add_arguments, _serve, "run the daemon"),
        ("gateway", gateway_command.add_arguments, gateway_command.run, "serve OpenAI's HTTP API in front of daemons"),
        ("config", _settings_arguments, _config, "show what holds for a daemon started like this, and whence"),
        ("install-service", _install_arguments, _install, "have systemd run a daemon with these settings"),
        ("uninstall-service", no_arguments, _uninstall, "stop the service, and remove what install-service wrote"),
        ("complete", complete.add_arguments, complete.run, "continue a text"),
        ("chat", chat.add_arguments, chat.run, "talk with the model"),
        ("batch", _batch_arguments, _batch, "answer a file of requests, and again only what is missing"),
        ("doctor", _doctor_arguments, _doctor, "say what would keep this machine from serving, and what to do"),
        ("plan", plan_command.add_arguments, plan_command.run, "say what a model would be like on a TPU, without one"),
        ("adapters", adapters_command.add_arguments, adapters_command.run, "load, unload and list adapters"),
        ("keys", keys_command.add_arguments, keys_command.run, "say who may connect from other machines"),
        ("bench", _bench_arguments, _bench, "put a load on the daemon and time its answers"),
    ):
        command = add_command(commands, name, what)
        add_arguments(command)
        command.set_defaults(run=run)
    for control in operate.COMMANDS:
        command = add_command(commands, control.name, control.what)
        control.add_arguments(command)
        which_daemon.add_arguments(command)
        command.set_defaults(run=functools.partial(operate.run, control))
    return command_line


def _settings_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    _settings_arguments(parser)
    what = "measure what the TPU (or GPU, or CPU) does: kernels, memory, copies, collectives, the model's steps"
    parser.add_argument("--tpu", action="store_true", default=False, help=what)
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="with --tpu, where to write that as JSON, to send it"
    )


def _install_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_setting_arguments(parser)
    parser.add_argument(
        "--print", action="store_true", default=False, help="show what would be written, and write nothing"
    )
    parser.add_argument(
        "--force", action="store_true", default=False, help="write it even where the service could not run as it is"
    )


def _batch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="requests, one a line: as OpenAI's batches have them, or plainly")
    add(
        "target",
        type=Path,
        metavar="OUT",
        help="results, as OpenAI's batches have them; what it has is not asked again",
    )
    which_daemon.add_arguments(parser)
    add("--max-concurrency", type=count, metavar="N", help="requests that are open at once (default: 128)")
    add(
        "--resume-timeout",
        type=seconds,
        metavar="SECONDS",
        help="seconds to wait for a daemon that has gone to come back (default: 300)",
    )


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    which_daemon.add_arguments(parser)
    which_daemon.add_model_argument(parser)
    add("--num-prompts", type=int, metavar="N", help="requests, of random token ids (default: 1000)")
    add("--random-input-len", type=int, metavar="N", help="tokens of each prompt (default: 128)")
    add("--random-output-len", type=int, metavar="N", help="tokens asked for, at most (default: 128)")
    add("--ignore-eos", action="store_true", help="never end before that")
    add("--request-rate", type=float, metavar="F", help="requests sent a second (default: inf, all at once)")
    add("--burstiness", type=float, metavar="F", help="1 is a Poisson process, less comes in bursts (default: 1)")
    add("--max-concurrency", type=int, metavar="N", help="requests that are open at once (default: no limit)")
    add("--seed", type=int, metavar="N", help="the same seed sends the same, at the same times (default: 0)")
    add("--save-result", action="store_true", help="write the figures as JSON, named as in `vllm bench serve`")
    add("--result-filename", type=Path, metavar="FILE", help="where to (default: a name made of model and time)")


def _serve(options: dict[str, Any]) -> NoReturn:
    from ipc.service.serve import serve

    serve(options)


def _config(options: dict[str, Any]) -> int:
    as_json = options.pop("json")
    found = settings.held(options)
    settings.configs(found)
    if found["bind"].value is None:
        found["bind"] = settings.SettingValue(default_address(), "default")
    found = settings.shown(found)
    if as_json:
        print(json.dumps({name: one._asdict() for name, one in found.items()}, indent=2, default=str))
    else:
        from ipc.commands.operators.listings import show_settings

        show_settings(found)
    return 0


def _install(options: dict[str, Any]) -> int:
    from ipc.commands.installation.install_service import install

    show, force = options.pop("print"), options.pop("force")
    install(options, show=show, force=force)
    return 0


def _uninstall(options: dict[str, Any]) -> int:
    from ipc.commands.installation.install_service import uninstall

    del options
    uninstall()
    return 0


def _batch(options: dict[str, Any]) -> int:
    from ipc.commands.requests import batch

    address, key = which_daemon.take(options)
    return batch.run(options.pop("source"), options.pop("target"), address, key=key, **options)


def _doctor(options: dict[str, Any]) -> int:
    from ipc.commands.diagnosis import doctor, findings

    as_json, tpu, path = options.pop("json"), options.pop("tpu"), options.pop("report", None)
    if tpu:
        from ipc.commands.diagnosis import hardware

        return hardware.run(options, path, as_json=as_json)
    if path is not None:
        raise ConfigurationError("--report is of what --tpu measures: give both")
    found = doctor.examine(options)
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        findings.show(found)
    return FAILED if any(finding.state == "bad" for finding in found) else 0


def _bench(options: dict[str, Any]) -> int:
    from ipc.benchmark.workload import Load
    from ipc.commands.requests import bench

    path = options.pop("result_filename", None)
    save = options.pop("save_result", False) or path is not None
    with which_daemon.client(options) as client:
        return bench.run(client, Load(**options), path, save=save)
