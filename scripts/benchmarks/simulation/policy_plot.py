"""What the policies are worth as one picture: a row for each trace, a line for each policy, over the rate of requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures.figure import Figure
from scripts.benchmarks.simulation.policies import SHIPPED
from scripts.benchmarks.simulation.simulate import AT

COLUMNS = ("goodput", "TTFT p99 of the median client", "TPOT p99", "preemptions in 1,000 requests")


def plot_policies(figures: Sequence[Figure], machine: Mapping[str, str], path: Path) -> None:
    """Write a PNG of the figures that ``measure_policies`` gave, whatever else is among them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows: dict[str, list[Figure]] = {}
    for figure in figures:
        trace, at, _ = figure.benchmark.removeprefix("simulate ").partition(AT)
        if at:
            rows.setdefault(trace, []).append(figure)
    canvas, axes = pyplot.subplots(
        len(rows), len(COLUMNS), figsize=(14, 0.6 + 2.4 * len(rows)), squeeze=False, layout="constrained"
    )
    for line, (trace, of_trace) in zip(axes, rows.items(), strict=True):
        for panel, name in zip(line, COLUMNS, strict=True):
            _panel(panel, trace, [figure for figure in of_trace if figure.name == name])
    axes[0][0].legend(fontsize=8)
    canvas.suptitle(f"Llama-3-8B on a TPU v5e-8, simulated, {machine['commit']}, {machine['date'][:10]}", fontsize=10)
    canvas.savefig(path, dpi=100)
    pyplot.close(canvas)


def _panel(panel: Any, trace: str, figures: Sequence[Figure]) -> None:
    rates = [float(figure.benchmark.partition(AT)[2].split()[0]) for figure in figures]
    lines = {name: [figure.others[name] for figure in figures] for name in figures[0].others}
    lines[SHIPPED.name] = [figure.value for figure in figures]
    for name, values in lines.items():
        ours = name == SHIPPED.name
        panel.plot(rates, values, label=name, marker="o", markersize=3, linewidth=2.5 if ours else 1.2)
    panel.set_title(f"{trace}: {figures[0].name}", loc="left", fontsize=8)
    panel.set_xlabel("requests/s", fontsize=8)
    panel.set_ylabel(figures[0].unit, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.set_ylim(bottom=0)
