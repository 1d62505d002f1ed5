"""What ``odriver doctor`` finds, and how it is shown."""

from collections.abc import Sequence
from typing import NamedTuple

from ipc.process import tables
from ipc.process.tables import plain, words_table


class Finding(NamedTuple):
    """The result of one check: ``state`` is good, warning or bad; ``advice`` may be empty."""

    check: str
    state: str
    found: str
    advice: str = ""


def show(findings: Sequence[Finding]) -> None:
    """Print them as a table."""
    marks = {"good": "[green]✓", "warning": "[yellow]![/]", "bad": "[red]✗"}
    table = words_table("oDriver's doctor", "", "", "found", "what to do")
    for check, state, found, advice in findings:
        table.add_row(marks[state], check, plain(found), plain(advice))
    tables.show(table)
