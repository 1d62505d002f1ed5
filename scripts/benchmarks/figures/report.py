"""Figures as one table, ratios first, and as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.figures.figure import Figure

GOOD = 1.0


def show(figures: Sequence[Figure], console: Console) -> None:
    """Print the table; above 1 ours is better, whatever the unit."""
    others = list(dict.fromkeys(name for figure in figures for name in figure.others))
    limits = any(figure.share is not None for figure in figures)
    table = Table(title="oDriver", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for name in others:
        table.add_column(f"x {name}", justify="right", overflow="fold")
    for name in (*["of the limit"] * limits, "measured", "", "from - to"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    benchmark = ""
    for figure in figures:
        if figure.benchmark != benchmark:
            benchmark = figure.benchmark
            table.add_section()
            table.add_row(f"[italic]{benchmark}")
        table.add_row(f"  {figure.name}", *_cells(figure, others, limits=limits))
    console.print(table)


def save(figures: Sequence[Figure], machine: Mapping[str, str], path: Path) -> None:
    """Write all there is to know of the figures."""
    content = {"machine": machine, "figures": msgspec.to_builtins(figures)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cells(figure: Figure, others: Sequence[str], *, limits: bool) -> list[str]:
    return [
        *(_ratio(figure.ratios[name]) if name in figure.ratios else "" for name in others),
        *["" if figure.share is None else f"{figure.share:.0%}"] * limits,
        _number(figure.value),
        figure.unit,
        f"{_number(min(figure.runs))} - {_number(max(figure.runs))}" if len(figure.runs) > 1 else "",
    ]


def _ratio(value: float) -> str:
    return f"[{'green' if value >= GOOD else 'red'}]{value:.2f}[/]"


def _number(value: float) -> str:
    """Three digits that matter."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
