"""What people see of the daemon: its start, on stderr, and tables of its numbers and settings."""

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from engine.progress import Progress
from ipc.service.settings import Held
from ipc.wire.plain import plain

if TYPE_CHECKING:
    from engine.planner.chip_plan import ChipPlan
    from ipc.commands.doctor import Finding
    from ipc.wire.keys import Limits

logger = logging.getLogger(__name__)

LOG_INTERVAL = 5.0
"""Seconds between log lines about one stage of the start."""


class StartUp(Protocol):
    """Shows how far a start has come, from entering it until leaving it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def show(self, progress: Progress) -> None:
        """Take notice of a report."""


def start_up(console: Console) -> StartUp:
    """Bars on a terminal, log lines elsewhere."""
    return _StartUpBars(console) if console.is_terminal else _StartUpLog()


def amount(progress: Progress) -> str:
    """``3 of 20 functions``, or ``1.2 MB of 8.0 MB``."""
    if progress.unit == "bytes":
        return f"{decimal(progress.done)} of {decimal(progress.total)}"
    return f"{progress.done} of {progress.total} {progress.unit}"


def show_ready(console: Console, facts: Mapping[str, str]) -> None:
    """A table on a terminal, a log line elsewhere."""
    if not console.is_terminal:
        logger.info("ready: %s", ", ".join(f"{name} {fact}" for name, fact in facts.items()))
        return
    table = _table("oDriver is ready")
    for name, fact in facts.items():
        table.add_row(name, plain(fact))
    console.print(table)


def show_status(status: Mapping[str, object]) -> None:
    """The daemon's numbers on stdout, a row each."""
    table = _table("oDriver")
    for name, value in status.items():
        label = name.removeprefix("num_").replace("_", " ")
        table.add_row(plain(label), plain(f"{value:,.4g}" if isinstance(value, float) else value))
    Console().print(table)


def show_settings(found: Mapping[str, Held]) -> None:
    """What holds for a daemon and whence, on stdout, a row each."""
    table = Table(title="oDriver's settings", title_justify="left")
    for heading in ("", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, (value, whence) in found.items():
        style = "dim" if whence == "default" else None
        table.add_row(name, plain("" if value is None else value), plain(whence), style=style)
    Console().print(table)


def show_keys(found: Mapping[str, "Limits"]) -> None:
    """Who may connect, on stdout, a row each."""
    table = Table(title="Keys", title_justify="left")
    for heading in ("name", "requests at once", "tokens per minute", "control", "public key"):
        table.add_column(heading, overflow="fold")
    for name, limits in found.items():
        counts = ["" if count is None else f"{count:,}" for count in (limits.max_requests, limits.tokens_per_minute)]
        table.add_row(plain(name), *counts, "yes" if limits.control else "", plain(limits.public))
    Console().print(table)


def show_findings(findings: Sequence["Finding"]) -> None:
    """What the doctor found, on stdout, a row each."""
    marks = {"good": "[green]✓", "warning": "[yellow]![/]", "bad": "[red]✗"}
    table = Table(title="oDriver's doctor", title_justify="left")
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check, state, found, advice in findings:
        table.add_row(marks[state], check, plain(found), plain(advice))
    Console().print(table)


def show_plan(plan: "ChipPlan") -> None:
    """What a chip holds, what was compiled for it, and what its steps take, on stdout."""
    Console().print(_plan_memory(plan))
    Console().print(_plan_steps(plan))
    Console().print(_plan_samplers(plan))
    Console().print(_plan_decode(plan))


def _plan_memory(plan: "ChipPlan") -> Table:
    table = _table(f"{plan.model} on {plan.tensor_parallel_size} of the {plan.chips} {plan.chip} of {plan.topology}")
    table.add_row("weights a chip", decimal(plan.weights))
    table.add_row("scratch", decimal(plan.scratch))
    table.add_row("pages", f"{decimal(plan.pages)}: {plan.num_pages:,} of {plan.page_size} tokens")
    table.add_row("may be used", f"{decimal(plan.budget)} of {decimal(plan.hbm)}")
    table.add_row("context", f"{plan.context_tokens:,} tokens in all, {plan.max_model_len:,} a sequence")
    table.add_row("compiled", f"{len(plan.functions)} functions in {plan.compile_seconds:.0f} s")
    return table


def _plan_steps(plan: "ChipPlan") -> Table:
    headings = ("tokens", "seconds", "scratch", "exchanges a layer", "and besides", "copies, gathers")
    table = _numbers("Steps, as they are compiled", *headings)
    for step in plan.steps:
        layer = [f"{one.per_layer:g} {one.kind}" for one in step.exchanges if one.per_layer]
        besides = [f"{one.besides} {one.kind}" for one in step.exchanges if one.besides]
        table.add_row(
            f"{step.size:,}", f"{step.compile_seconds:.1f}", decimal(step.scratch_bytes), ", ".join(layer) or "none",
            ", ".join(besides) or "none",
            _lines(*step.copies, *step.gathers) or ("none" if step.readable else "not known"),
        )  # fmt: skip
    return table


def _plan_samplers(plan: "ChipPlan") -> Table:
    table = _numbers("Between logits and tokens, for most rows", "", "rows", "seconds", "scratch", "gathers of logits")
    largest = {one.name: one for one in sorted(plan.functions, key=lambda one: one.size) if one.name != "step"}
    for one in largest.values():
        gathers = _lines(*one.gathers) or ("none" if one.readable else "not known")
        table.add_row(one.name, f"{one.size}", f"{one.compile_seconds:.1f}", decimal(one.scratch_bytes), gathers)
    return table


def _plan_decode(plan: "ChipPlan") -> Table:
    table = _numbers(
        f"Decoding sequences of {plan.tokens_a_sequence:,} tokens, at best; bytes of a chip",
        *("sequences", "must read", "reads", "writes", "ms to move", "to compute", "to exchange", "tokens/s"),
    )
    for step in plan.decode:
        seconds = step.bandwidth_seconds, step.compute_seconds, step.exchange_seconds
        table.add_row(
            f"{step.sequences:,}", decimal(step.bytes_needed), decimal(step.bytes_read), decimal(step.bytes_written),
            *(f"{1e3 * each:.2f}" for each in seconds), f"{step.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table


def _lines(*texts: str) -> Text:
    return Text("\n").join(map(plain, texts))


def _numbers(title: str, *headings: str) -> Table:
    table = Table(title=Text(title, "table.title"), title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _table(title: str) -> Table:
    table = Table(title=Text(title, "table.title"), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


class _StartUpBars:
    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        self._stages[""] = self._bars.add_task("starting", total=None, amount="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        if progress.stage not in self._stages:
            self._bars.update(self._stages[""], visible=False)
            self._stages[progress.stage] = self._bars.add_task(progress.stage, amount="")
        stage = self._stages[progress.stage]
        self._bars.update(stage, completed=progress.done, total=progress.total, amount=amount(progress))


class _StartUpLog:
    def __init__(self) -> None:
        self._stage = ""
        self._next_line = 0.0

    def __enter__(self) -> Self:
        logger.info("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage or progress.done == progress.total or now >= self._next_line:
            logger.info("%s: %s", progress.stage, amount(progress))
            self._stage, self._next_line = progress.stage, now + LOG_INTERVAL
