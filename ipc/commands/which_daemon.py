"""The daemon of a command, and its identity."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ipc.client import Client
from ipc.errors import ConnectFailed, DaemonStarting
from ipc.service import settings
from ipc.wire.addresses import SERVICE, anyone_listens, client_address, is_forbidden
from ipc.wire.configured import configured_bind
from ipc.wire.escaping import one_line

PATIENCE = 3.0
"""Seconds of one attempt to connect, after which the progress of a start is shown."""
LONGEST_SILENCE = 10.0
"""Seconds after which a daemon that says nothing is given up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--connect``, ``--key`` and ``--config``."""
    add = parser.add_argument
    add("--connect", metavar="ADDR", help="where the daemon listens (default: the `bind` that `odriver config` shows)")
    add("--key", type=Path, metavar="FILE", help="a key from `odriver keys new`, where the daemon asks for one")
    settings.add_config_argument(parser)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """``--model``, which ``client`` reads."""
    parser.add_argument("--model", metavar="NAME", help="an adapter that the daemon has loaded (default: none)")


def take(options: dict[str, Any]) -> tuple[str, Path | None]:
    """Address and key from the options. A command does not wait for a daemon to start."""
    key = options.pop("key", None)
    config = options.pop("config", None)
    asked = options.pop("connect", None)
    address = client_address(asked, has_key=key is not None, config=config)
    if address == SERVICE and asked is None and configured_bind(config) is None:
        print(f"odriver: no daemon of yours runs, and the service answers, at {SERVICE}", file=sys.stderr)
    if is_forbidden(address):
        raise ConnectFailed(
            f"{address} is not for this user: join its group (for the service: `sudo usermod -aG odriver NAME`, and log "
            "in again), or use sudo"
        )
    if not anyone_listens(address):
        raise ConnectFailed.nobody(address)
    return address, key


def client(options: dict[str, Any]) -> Client:
    """A client of that daemon. One that starts is waited for, and what it says is shown."""
    address, key = take(options)
    model = options.pop("model", None)
    told, answered_at = "", time.monotonic()
    while True:
        began = time.monotonic()
        try:
            found = Client(address, PATIENCE, key=key)
            return found if model is None else found.of_model(found.welcome.adapter_of(model))
        except DaemonStarting as starting:
            answered_at = time.monotonic()
            if str(starting) != told:
                over = "\x1b[A\x1b[K" if told and sys.stderr.isatty() else ""  # the line before
                told = str(starting)
                print(f"{over}odriver: {one_line(told)}", file=sys.stderr)
        except ConnectFailed:
            now = time.monotonic()  # a refusal comes before this attempt's time is over
            if now - began < PATIENCE or now - answered_at > LONGEST_SILENCE:
                raise
