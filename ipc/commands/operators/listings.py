"""Tables on stdout: the daemon's numbers and requests, settings and keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ipc.process.tables import facts_table, plain, show, words_table
from ipc.service.settings import SETTINGS, SettingValue
from ipc.wire.keys import ALL, Limits


def show_status(status: Mapping[str, object]) -> None:
    """The daemon's numbers."""
    table = facts_table("oDriver")
    for name, value in status.items():
        label = name.removeprefix("num_").replace("_", " ")
        table.add_row(plain(label), plain(_words(value)))
    show(table)


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def show_settings(found: Mapping[str, SettingValue]) -> None:
    """Print a daemon's settings and their origins."""
    table = words_table("oDriver's settings", "", "value", "from")
    for name, (value, whence) in found.items():
        style = "dim" if whence == "default" else None
        table.add_row(
            name, plain(SETTINGS[name].default_words if value in (None, "", ()) else value), plain(whence), style=style
        )
    show(table)


def show_requests(rows: Sequence[Mapping[str, Any]], total: int) -> None:
    """Open requests, and how many there are beside."""
    table = words_table(
        "Open requests", "id", "client", "user", "model", "state", "age", "prompt", "tokens", "tokens/s"
    )
    for row in rows:
        words = [plain(row[name]) for name in ("id", "client", "user", "model", "state")]
        numbers = [duration(row["age_s"]), f"{row['prompt_tokens']:,}", f"{row['completion_tokens']:,}"]
        table.add_row(*words, *numbers, f"{row['tokens_per_second']:,.1f}")
    if total:
        show(table)
    more = total - len(rows)
    print(f"{total:,} open" + (f", of which {more:,} are not shown: --limit" if more else ""))


def duration(seconds: float) -> str:
    """``5 s``, ``3 min``, ``2 h`` or ``9 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{math.floor(seconds / length)} {unit}"
    return f"{seconds:.0f} s"


def show_adapters(rows: Sequence[Mapping[str, Any]]) -> None:
    """The loaded adapters."""
    table = words_table("Adapters", "name", "path", "version", "rank", "MiB", "pinned", "open requests")
    for row in rows:
        numbers = [str(row["version"]), str(row["rank"]), f"{row['num_bytes'] / 2**20:,.1f}"]
        pinned = "yes" if row["pinned"] else ""
        table.add_row(plain(row["name"]), plain(row["path"]), *numbers, pinned, f"{row['open_requests']:,}")
    if rows:
        show(table)
    else:
        print("no adapters are loaded")


def _adapters(limits: Limits) -> Text:
    """Those that a key may use."""
    return plain(ALL if limits.control else ", ".join(limits.adapters))


def show_keys(found: Mapping[str, Limits]) -> None:
    """Print the authorised keys."""
    columns = ("name", "requests at once", "tokens per minute", "least priority", "control", "adapters", "public key")
    table = words_table("Keys", *columns)
    for name, limits in found.items():
        counts = ["" if count is None else f"{count:,}" for count in (limits.max_requests, limits.tokens_per_minute)]
        counts.append("" if limits.control else str(limits.least_priority))
        table.add_row(plain(name), *counts, "yes" if limits.control else "", _adapters(limits), plain(limits.public))
    show(table)
