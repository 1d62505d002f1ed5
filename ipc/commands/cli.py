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
from ipc.client import Client
from ipc.commands import complete, gateway_command, keys_command, operate, plan_command
from ipc.commands import format_flags as structured_outputs
from ipc.commands import which_daemon as connecting
from ipc.commands.arguments import count
from ipc.errors import OdriverError
from ipc.service import settings
from ipc.wire.escaping import LONGEST_LINE, visible

FAILED = 1
INTERRUPTED = 130
"""Exit codes beside 0 and EX_CONFIG; argparse exits with 2 where a command line is wrong, and ``serve`` has its own."""


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would complain again
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "odriver", description="Serve a language model, and talk to it.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add_arguments, run, what in (
        ("serve", settings.add_arguments, _serve, "run the daemon"),
        ("gateway", gateway_command.add_arguments, gateway_command.run, "serve OpenAI's HTTP API in front of daemons"),
        ("config", _config_arguments, _config, "show what holds for a daemon started like this, and whence"),
        (
            "install-service",
            _install_service_arguments,
            _install_service,
            "have systemd run a daemon with these settings",
        ),
        ("complete", _complete_arguments, _complete, "continue a text"),
        ("chat", _chat_arguments, _chat, "talk with the model"),
        ("batch", _batch_arguments, _batch, "answer a file of requests, and again only what is missing"),
        ("doctor", _doctor_arguments, _doctor, "say what would keep this machine from serving, and what to do"),
        ("plan", plan_command.add_arguments, plan_command.run, "say what a model would be like on a TPU, without one"),
        ("keys", keys_command.add_arguments, keys_command.run, "say who may connect from other machines"),
        ("bench", _bench_arguments, _bench, "put a load on the daemon and time its answers"),
    ):
        # What is not given is left out, and so has the default of whoever reads it.
        command = commands.add_parser(
            name, help=what, description=what, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        add_arguments(command)
        command.set_defaults(run=run)
    for control in operate.COMMANDS:
        command = commands.add_parser(
            control.name,
            help=control.what,
            description=control.what,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        control.add_arguments(command)
        connecting.add_arguments(command)
        command.set_defaults(run=functools.partial(operate.run, control))
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _install_service_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_setting_arguments(parser)
    parser.add_argument(
        "--print", action="store_true", default=False, help="show what would be written, and write nothing"
    )


def _complete_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", default=None, metavar="PROMPT", help="the text to continue (default: what stdin says)")
    connecting.add_arguments(parser)
    complete.add_sampling_arguments(parser)
    structured_outputs.add_arguments(parser)


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    connecting.add_arguments(parser)


def _batch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="requests, one a line: as OpenAI's batches have them, or plainly")
    add(
        "target",
        type=Path,
        metavar="OUT",
        help="results, as OpenAI's batches have them; what it has is not asked again",
    )
    connecting.add_arguments(parser)
    add("--max-concurrency", type=count, metavar="N", help="requests that are open at once (default: 128)")
    add(
        "--resume-timeout",
        type=float,
        metavar="F",
        help="seconds to wait for a daemon that has gone to come back (default: 300)",
    )


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", default=False, help="as JSON instead of a table")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    connecting.add_arguments(parser)
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
    from ipc.service import daemon

    daemon.serve(options)


def _config(options: dict[str, Any]) -> int:
    as_json = options.pop("json")
    found = settings.held(options)
    settings.configs(found)
    if as_json:
        print(json.dumps({name: one._asdict() for name, one in found.items()}, indent=2, default=str))
    else:
        from ipc.commands.tables import show_settings

        show_settings(found)
    return 0


def _install_service(options: dict[str, Any]) -> int:
    from ipc.commands.install_service import install

    show = options.pop("print")
    install(options, show=show)
    return 0


def _complete(options: dict[str, Any]) -> int:
    with _connected(options) as client:
        prompt, as_json = options.pop("prompt"), options.pop("json")
        options = structured_outputs.take(options)
        complete.show(client, _read_prompt() if prompt is None else prompt, options, json=as_json)
    return 0


def _chat(options: dict[str, Any]) -> int:
    from ipc.commands import chat

    with _connected(options) as client:
        chat.converse(client)
    return 0


def _batch(options: dict[str, Any]) -> int:
    from ipc.commands import batch

    address, key = connecting.take(options)
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
    with _connected(options) as client:
        return bench.run(client, Load(**options), path, save=save)


def _connected(options: dict[str, Any]) -> Client:
    address, key = connecting.take(options)
    return Client(address, key=key)


def _read_prompt() -> str:
    """All of stdin, less the newline that ends a line."""
    if sys.stdin.isatty():
        print("odriver: type the prompt, then Ctrl-D", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")
