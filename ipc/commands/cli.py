"""The ``odriver`` command."""

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from driver.errors import shortened
from engine.errors import ConfigurationError
from ipc.commands import complete, gateway_command, keys_command, operate, plan_command, which_daemon
from ipc.commands.arguments import add_command, count
from ipc.errors import OdriverError
from ipc.service import settings
from ipc.wire.escaping import LONGEST_LINE, visible

FAILED = 1
INTERRUPTED = 130
"""Exit codes beside 0 and EX_CONFIG. argparse uses 2; ``serve`` has codes of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = vars(_parser().parse_args(arguments))
    run = options.pop("run")
    try:
        return int(run(options))
    except (OdriverError, ConfigurationError) as error:
        print(f"odriver: {visible(shortened(str(error), LONGEST_LINE))}", file=sys.stderr)
        return FAILED if isinstance(error, OdriverError) else os.EX_CONFIG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Without this, the interpreter reports the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "odriver", description="Serve a language model, and talk to it.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add_arguments, run, what in (
        ("serve", settings.add_arguments, _serve, "run the daemon"),
        ("gateway", gateway_command.add_arguments, gateway_command.run, "serve OpenAI's HTTP API in front of daemons"),
        ("config", _settings_arguments, _config, "show what holds for a daemon started like this, and whence"),
        ("install-service", _install_arguments, _install, "have systemd run a daemon with these settings"),
        ("complete", complete.add_arguments, complete.run, "continue a text"),
        ("chat", which_daemon.add_arguments, _chat, "talk with the model"),
        ("batch", _batch_arguments, _batch, "answer a file of requests, and again only what is missing"),
        ("doctor", _settings_arguments, _doctor, "say what would keep this machine from serving, and what to do"),
        ("plan", plan_command.add_arguments, plan_command.run, "say what a model would be like on a TPU, without one"),
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
    return parser


def _settings_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _install_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_setting_arguments(parser)
    parser.add_argument(
        "--print", action="store_true", default=False, help="show what would be written, and write nothing"
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
        type=float,
        metavar="F",
        help="seconds to wait for a daemon that has gone to come back (default: 300)",
    )


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    which_daemon.add_arguments(parser)
    add("--num-prompts", type=int, metavar="N", help="requests, of random token ids (default: 1000)")
    add("--random-input-len", type=int, metavar="N", help="tokens of each prompt (default: 128)")
    add("--random-output-len", type=int, metavar="N", help="tokens asked for, at most (default: 128)")
    add("--ignore-eos", action="store_true", help="never end before that")
    add("--request-rate", type=float, metavar="F", help="requests sent a second (default: inf, all at once)")
    add("--burstiness", type=float, metavar="F", help="1 is a Poisson process, less comes in bursts (default: 1)")
    add("--max-concurrency", type=int, metavar="N", help="requests that are open at once (default: no limit)")
    add("--seed", type=int, metavar="N", help="the same seed sends the same, at the same times (default: 0)")
    add("--save-result", action="store_true", help="write the figures as JSON, named as in `vllm bench serve`")
    add(
        "--result-filename",
        type=Path,
        metavar="FILE",
        help="where to (default: a name made of model and time)",
    )


def _serve(options: dict[str, Any]) -> NoReturn:
    from ipc.service.serve import serve

    serve(options)


def _config(options: dict[str, Any]) -> int:
    as_json = options.pop("json")
    found = settings.held(options)
    settings.configs(found)
    if as_json:
        print(json.dumps({name: one._asdict() for name, one in found.items()}, indent=2, default=str))
    else:
        from ipc.commands.listings import show_settings

        show_settings(found)
    return 0


def _install(options: dict[str, Any]) -> int:
    from ipc.commands.install_service import install

    show = options.pop("print")
    install(options, show=show)
    return 0


def _chat(options: dict[str, Any]) -> int:
    from ipc.commands import chat

    with which_daemon.client(options) as client:
        chat.converse(client)
    return 0


def _batch(options: dict[str, Any]) -> int:
    from ipc.commands import batch

    address, key = which_daemon.take(options)
    return batch.run(options.pop("source"), options.pop("target"), address, key=key, **options)


def _doctor(options: dict[str, Any]) -> int:
    from ipc.commands import doctor

    as_json = options.pop("json")
    findings = doctor.examine(options)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        doctor.show(findings)
    return FAILED if any(finding.state == "bad" for finding in findings) else 0


def _bench(options: dict[str, Any]) -> int:
    from ipc.benchmark.workload import Load
    from ipc.commands import bench

    path = options.pop("result_filename", None)
    save = options.pop("save_result", False) or path is not None
    with which_daemon.client(options) as client:
        return bench.run(client, Load(**options), path, save=save)
