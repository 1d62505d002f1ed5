"""``odriver gateway``: OpenAI's HTTP API in front of daemons."""

import argparse
from pathlib import Path
from typing import Any

from ipc.commands.arguments import port, seconds
from ipc.process.http_socket import HOST, PORT
from ipc.service import settings
from ipc.wire.addresses import client_address

RESUME_TIMEOUT = 60.0
"""Seconds in which a daemon that systemd starts again is back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for the daemons' addresses and the gateway's own."""
    add = parser.add_argument
    add(
        "--connect",
        action="append",
        metavar="ADDR",
        help="a daemon's address; may be given several times, and `model` then selects the daemon (default: the `bind` that "
        "`odriver config` shows)",
    )
    add("--key", type=Path, metavar="FILE", help="a key from `odriver keys new`, where the daemons ask for one")
    add(
        "--resume-timeout",
        type=seconds,
        metavar="SECONDS",
        help="how long open requests of a daemon that went away wait to be resumed, by it or by another replica "
        f"(default: {RESUME_TIMEOUT:g})",
    )
    add("--host", metavar="HOST", help=f"address to serve at (default: {HOST})")
    add("--port", type=port, metavar="PORT", help=f"port to serve at; 0 is any that is free (default: {PORT})")
    settings.add_setting_arguments(parser, settings.GATEWAY_OPTIONS)
    settings.add_config_argument(parser)


def run(options: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code."""
    from ipc.gateway import http_server as server

    host, key = options.pop("host", HOST), options.pop("key", None)
    addresses, at, config = options.pop("connect", [None]), options.pop("port", PORT), options.get("config")
    resume_timeout = options.pop("resume_timeout", RESUME_TIMEOUT)
    found = settings.held(options)
    http = settings.http_config(found)
    host = HOST if host == "localhost" else host
    http.check_reach(host)
    return server.run(
        [client_address(address, has_key=key is not None, config=config) for address in addresses],
        host=host,
        port=at,
        key=key,
        resume_timeout=resume_timeout,
        **{name: found[name].value for name in settings.GATEWAY_OPTIONS},
    )
