"""The progress of the daemon's start, and its result, on a terminal or in the log."""

import logging
import time
from collections.abc import Mapping
from itertools import chain
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from engine.progress import Progress
from ipc.process.tables import facts_table, plain

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
        fields = ", ".join(["%s %s"] * len(facts))  # of the record: only those that are too long are cut
        logger.info(f"ready: {fields}", *chain.from_iterable(facts.items()))
        return
    table = facts_table("oDriver is ready")
    for name, fact in facts.items():
        table.add_row(name, plain(fact))
    console.print(table)


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
