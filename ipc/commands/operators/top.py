"""``odriver top``: what a daemon is doing, in a terminal, as it goes."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ipc.commands.operators.listings import duration
from ipc.process.tables import plain

Status = Mapping[str, Any]
"""As ``Client.status`` returns it."""
MOST_CLIENTS, MOST_ADAPTERS = 10, 5
"""Clients and adapters that are listed."""


def run(status: Callable[[], Status], interval: float, *, once: bool, console: Console) -> None:
    """Show how the daemon is, every ``interval`` seconds until Ctrl-C, or once; into a pipe or a file one below the
    other."""
    before, began = status(), time.monotonic()
    time.sleep(interval)
    now, at = status(), time.monotonic()
    first = view(before, now, at - began)
    is_drawn = console.is_terminal and not console.is_dumb_terminal  # elsewhere Live shows nothing before the end
    if once or not is_drawn:
        console.print(first)
    if once:
        return
    with Live(first, console=console, screen=True, auto_refresh=False) if is_drawn else nullcontext() as live:
        while True:
            time.sleep(interval)
            before, began, now, at = now, at, status(), time.monotonic()
            look = view(before, now, at - began)
            if live is None:
                console.print(Text(), look)
            else:
                live.update(look, refresh=True)


def view(before: Status, now: Status, seconds: float) -> RenderableType:
    """The display, from two statuses that are this many seconds apart."""

    def rate(name: str) -> float:
        return float(now[name] - before[name]) / seconds

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    clients = f"{now['clients']} client{'' if now['clients'] == 1 else 's'}"
    table.add_row("model", plain(f"{now['model']}, up {duration(now['uptime_seconds'])}, {clients}"))
    table.add_row(
        "tokens a second",
        f"{rate('generated_tokens'):,.1f} generated, {rate('prompt_tokens'):,.1f} of prompts, in {rate('steps'):,.1f} steps",
    )
    table.add_row(
        "requests",
        f"{now['running']} of {now['max_num_seqs']} slots, {now['waiting'] + now.get('deferred', 0)} waiting,"
        f" {now['queued_requests']} to be prepared",
    )
    table.add_row("pages", _pages(now))
    if now["adapters"]:
        table.add_row("adapters", plain(_adapters(now)))
    if now["num_accepted_tokens_per_pos"]:
        table.add_row("drafts", _drafts(before, now, seconds))
    for name, words in (("ttft", "first token"), ("tpot", "each further"), ("e2e", "whole request")):
        middle, most = now[f"{name}_seconds_p50"], now[f"{name}_seconds_p99"]
        table.add_row(words, f"{_milliseconds(middle)} median, {_milliseconds(most)} p99")
    gaps = max(1, now["step_gap_seconds_count"] - before["step_gap_seconds_count"])
    table.add_row("step gap", f"{_milliseconds(rate('step_gap_seconds_sum') * seconds / gaps)} mean")
    table.add_row("step", _step(before, now))
    table.add_row("since the start", f"{now['generated_tokens']:,} tokens, {now['preemptions']:,} preemptions")
    return Group(table, *_clients(now), *_warnings(now))


def _step(before: Status, now: Status) -> str:
    """The mean of each phase of the steps in between, as far as there were any."""
    steps, earlier = max(1, now["steps"] - before["steps"]), before["step_seconds"]
    phases = now["step_seconds"].items()
    return ", ".join(f"{phase} {_milliseconds((total - earlier[phase]) / steps)}" for phase, total in phases)


def _drafts(before: Status, now: Status, seconds: float) -> str:
    """Of the steps in between; a row with drafts has its own next token beside those accepted."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    rows, drafted, accepted = (now[name] - before[name] for name in names)
    if not rows:
        return "none"
    earlier = now["num_earlier_accepted_tokens"] - before["num_earlier_accepted_tokens"]
    of_earlier = f" ({earlier / accepted:.0%} of these from earlier requests)" if earlier else ""
    return (
        f"{drafted / seconds:,.1f} tokens a second, {accepted / drafted:.0%} accepted{of_earlier}, "
        f"{1 + accepted / rows:.2f} tokens a row"
    )


def _pages(now: Status) -> RenderableType:
    used, cached, total = now["pages_owned"], now["pages_cached"], max(1, now["pages_total"])
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Bar(total, 0, used, width=20), f"{used / total:.0%} of {total:,} in use, {cached / total:.0%} cached")
    return grid


def _adapters(now: Status) -> str:
    """Those with the most open requests."""
    most = sorted(now["adapters"].items(), key=lambda one: one[1], reverse=True)
    shown = ", ".join(f"{name} {count:,}" for name, count in most[:MOST_ADAPTERS])
    return f"{len(most):,} loaded; open requests: {shown}"


def _clients(now: Status) -> list[RenderableType]:
    """Those with the most open requests."""
    most = sorted(now["requests_by_client"].items(), key=lambda one: one[1], reverse=True)
    if not most:
        return []
    table = Table(box=None, padding=(0, 2), title_justify="left")
    table.add_column("client", overflow="fold")
    table.add_column("open", justify="right")
    table.add_column("without a token yet", justify="right")
    for client, (num_open, num_waiting) in most[:MOST_CLIENTS]:
        table.add_row(plain(client or "(local)"), str(num_open), str(num_waiting))
    return [Text(), table]


def _warnings(now: Status) -> list[Text]:
    """Conditions that need attention."""
    warnings = []
    if now["state"] != "serving":
        warnings.append(f"the daemon is {now['state']}")
    if now["compilations_after_ready"]:
        warnings.append(f"{now['compilations_after_ready']} compilations after READY")
    for stage, seconds in now["stages"].items():
        if seconds > 1:
            warnings.append(f"nothing has got done in the {stage} stage for {seconds:.0f} s")
    return [Text(warning, style="red") for warning in warnings]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
