"""Figures as one picture: how many times better than others, and how near to the limit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures.figure import Figure

BAR = 0.28
"""Inches of height that a bar takes."""


def plot(figures: Sequence[Figure], machine: Mapping[str, str], path: Path) -> None:
    """Write a PNG. Raises ImportError where matplotlib is not installed, and nothing else needs it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    ratios = {f"{_label(figure)} : {other}": ratio for figure in figures for other, ratio in figure.ratios.items()}
    shares = {_label(figure): figure.share for figure in figures if figure.share is not None}
    rows = [max(1, len(ratios)), max(1, len(shares))]
    canvas, (left, right) = pyplot.subplots(
        2, 1, figsize=(10, 2 + BAR * sum(rows)), height_ratios=rows, layout="constrained"
    )
    _bars(left, ratios, "times better than (1 is level)", ".2f")
    _bars(right, shares, "share of what the machine allows", ".0%")
    about = f"{machine['processor']}, {machine['cores']} cores, {machine['date'][:10]}, {machine['commit']}"
    canvas.suptitle(f"oDriver\n{about}", fontsize=10)
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


def _label(figure: Figure) -> str:
    return f"{figure.benchmark.partition(' ')[2] or figure.benchmark}, {figure.name}"


def _bars(axes: Any, values: Mapping[str, float], title: str, form: str) -> None:
    colours = ["tab:green" if value >= 1 else "tab:orange" for value in values.values()]
    bars = axes.barh(list(values), list(values.values()), color=colours)
    axes.bar_label(bars, labels=[format(value, form) for value in values.values()], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.1)
    axes.invert_yaxis()
