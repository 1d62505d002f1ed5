"""Tables on stdout: the daemon's numbers, settings and keys."""

from collections.abc import Mapping

from rich.console import Console

from ipc.process.tables import facts_table, plain, words_table
from ipc.service.settings import SettingValue
from ipc.wire.keys import Limits


def show_status(status: Mapping[str, object]) -> None:
    """The daemon's numbers."""
    table = facts_table("oDriver")
    for name, value in status.items():
        label = name.removeprefix("num_").replace("_", " ")
        table.add_row(plain(label), plain(f"{value:,.4g}" if isinstance(value, float) else value))
    Console().print(table)


def show_settings(found: Mapping[str, SettingValue]) -> None:
    """Print a daemon's settings and their origins."""
    table = words_table("oDriver's settings", "", "value", "from")
    for name, (value, whence) in found.items():
        style = "dim" if whence == "default" else None
        table.add_row(name, plain("" if value is None else value), plain(whence), style=style)
    Console().print(table)


def show_keys(found: Mapping[str, Limits]) -> None:
    """Print the authorised keys."""
    table = words_table("Keys", "name", "requests at once", "tokens per minute", "control", "public key")
    for name, limits in found.items():
        counts = ["" if count is None else f"{count:,}" for count in (limits.max_requests, limits.tokens_per_minute)]
        table.add_row(plain(name), *counts, "yes" if limits.control else "", plain(limits.public))
    Console().print(table)
