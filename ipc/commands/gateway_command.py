"""``odriver gateway``: OpenAI's HTTP API in front of daemons."""

import argparse
from pathlib import Path
from typing import Any

from ipc.commands.arguments import count, port, seconds
from ipc.service import settings
from ipc.service.configuration import LOG_FORMATS, LOG_LEVELS
from ipc.wire.addresses import client_address


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
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="API keys of the callers, in TOML (default: everybody on this machine)",
    )
    add("--host", metavar="HOST", help="where to serve (default: 127.0.0.1)")
    add("--port", type=port, metavar="PORT", help="and at which port; 0 is any that is free (default: 8000)")
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="and its key")
    add(
        "--tool-call-parser",
        choices=("hermes", "llama3_json", "mistral"),
        help="format of tool calls (default: as the chat template shows)",
    )
    add(
        "--reasoning-parser",
        choices=("qwen3", "deepseek_r1"),
        help="format of reasoning (default: as the chat template shows)",
    )
    add(
        "--trusted-proxies",
        metavar="CIDR,...",
        help="addresses or networks of proxies whose X-Forwarded-For is believed (default: none)",
    )
    add(
        "--max-connections",
        type=count,
        metavar="N",
        help="connections that may be open at once, half of them from one address (default: 4096)",
    )
    add("--drain-timeout", type=seconds, metavar="S", help="seconds to finish what is open in (default: 30)")
    add("--log-level", choices=LOG_LEVELS, help="the least that is logged (default: info, a line for each request)")
    add("--log-format", choices=LOG_FORMATS, help="of the log on stderr (default: text)")


def run(options: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code."""
    from ipc.gateway import http_server as server

    key = options.get("key")
    if options.get("host") == "localhost":
        options["host"] = "127.0.0.1"
    addresses = options.pop("connect", None) or [settings.held({})["bind"].value]
    return server.run([client_address(address, has_key=key is not None) for address in addresses], **options)
