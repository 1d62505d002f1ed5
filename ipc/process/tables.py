"""Tables on a terminal, whose values may be text of clients."""

import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ipc.wire.escaping import one_line

PIPE_WIDTH = 240
"""Columns of tables that go to a pipe or a file, where nothing has to be cut; COLUMNS overrides."""


def show(*tables: Table) -> None:
    """Print tables on stdout."""
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=PIPE_WIDTH)
    for table in tables:
        console.print(table)


def plain(value: object, style: str = "") -> Text:
    """A value as plain text, for a cell or a title: rich would parse a string as markup."""
    return Text(one_line(str(value)), style)


def facts_table(title: str) -> Table:
    """A name and a value in each row."""
    table = Table(title=plain(title, "table.title"), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def words_table(title: str, *headings: str) -> Table:
    """Columns of text, each under its heading."""
    table = Table(title=plain(title, "table.title"), title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def numbers_table(title: str, *headings: str) -> Table:
    """Columns of numbers, each under its heading. Where there is no room for one it is folded: a digit less is
    another number."""
    table = Table(title=plain(title, "table.title"), title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
