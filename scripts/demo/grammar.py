"""Reads the plots: plain text files in which a paragraph is a beat of the story and a line one way to tell it.

A paragraph that opens with ``choose: a | b`` is a table instead: a row is drawn, and its cells become {a} and {b}.
A beat that opens with ``(maybe)`` is told now and then. In a line, [this|that] is drawn and {name} filled in;
{Name} is the same with a capital.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

PLOTS = Path(__file__).parent / "plots"
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Table:
    """Rows of which one is drawn: each gives the slots ``names`` their values together."""

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Beat:
    """One step of a story in its possible wordings."""

    lines: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class Plot:
    """The tables a story draws from and the beats that tell it, in order."""

    tables: tuple[Table, ...]
    beats: tuple[Beat, ...]

    def draw_slots(self, rng: Random) -> dict[str, str]:
        """One row of each table."""
        return {
            name: cell for table in self.tables for name, cell in zip(table.names, rng.choice(table.rows), strict=True)
        }

    def tell(self, rng: Random, slots: dict[str, str]) -> str:
        """The beats as sentences, with ``slots`` filled in; raises KeyError for a slot that nobody filled."""
        told = [beat for beat in self.beats if not beat.optional or rng.random() < 0.4]
        return " ".join(fill(rng.choice(beat.lines), slots, rng) for beat in told)


@cache
def read_plot(name: str) -> Plot:
    """The plot of that name."""
    paragraphs = (PLOTS / f"{name}.txt").read_text(encoding="utf-8").strip().split("\n\n")
    blocks = [paragraph.splitlines() for paragraph in paragraphs]
    tables = [_table(block) for block in blocks if block[0].startswith("choose: ")]
    beats = [_beat(block) for block in blocks if not block[0].startswith("choose: ")]
    return Plot(tuple(tables), tuple(beats))


def fill(line: str, slots: dict[str, str], rng: Random) -> str:
    """``line`` with its alternatives drawn and its slots filled, in the values of slots too."""
    while found := _ALTERNATIVES.search(line) or _SLOT.search(line):
        inner = found[1]
        value = rng.choice(inner.split("|")) if found[0][0] == "[" else _slot(inner, slots)
        line = line[: found.start()] + value + line[found.end() :]
    return line


def _slot(name: str, slots: dict[str, str]) -> str:
    value = slots[name[0].lower() + name[1:]]
    return value[0].upper() + value[1:] if name[0].isupper() else value


def _table(block: list[str]) -> Table:
    names = _cells(block[0].removeprefix("choose: "))
    rows = tuple(_cells(line) for line in block[1:])
    assert all(len(row) == len(names) for row in rows), f"a row of {names} has a cell too many or too few"
    return Table(names, rows)


def _beat(block: list[str]) -> Beat:
    optional = block[0] == "(maybe)"
    return Beat(tuple(block[1:] if optional else block), optional)


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|"))
