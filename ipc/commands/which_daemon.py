"""The daemon of a command, and its identity."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ipc.client import Client
from ipc.errors import ConnectFailed
from ipc.service import settings
from ipc.wire.addresses import SERVICE, anyone_listens, client_address, is_forbidden


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--connect`` and ``--key``."""
    add = parser.add_argument
    add("--connect", metavar="ADDR", help="where the daemon listens (default: the `bind` that `odriver config` shows)")
    add("--key", type=Path, metavar="FILE", help="a key from `odriver keys new`, where the daemon asks for one")


def take(options: dict[str, Any]) -> tuple[str, Path | None]:
    """Address and key from the options. A command does not wait for a daemon to start."""
    key = options.pop("key", None)
    asked = options.pop("connect", None) or settings.held({})["bind"].value
    address = client_address(asked, has_key=key is not None)
    if asked is None and address == SERVICE:
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
    """A client of that daemon."""
    address, key = take(options)
    return Client(address, key=key)
