"""`scripts/bench`: measures, shows and saves."""

import sys
from collections.abc import Sequence

from rich.console import Console

from engine.errors import ConfigurationError
from scripts.benchmarks.command_line.arguments import parsed
from scripts.benchmarks.figures.figure import MeasurementFailed
from scripts.benchmarks.figures.machine import busy, describe_machine
from scripts.benchmarks.figures.report import save, show
from scripts.benchmarks.hostile.measure import HostileFailed

WIDTH = 132
"""Columns of a table that goes to a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand, or all; the exit code."""
    options = parsed(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if warning := busy():
        console.print(f"warning: {warning}", style="yellow")
    machine, figures = describe_machine(), []
    try:
        for figure in options.measure(options):
            figures.append(figure)
            console.print(f"  {figure.benchmark}: {figure.name}: {figure.value:,.4g} {figure.unit}", highlight=False)
    except (ConfigurationError, MeasurementFailed) as error:
        if isinstance(error, HostileFailed):
            show(figures, console)
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    show(figures, console)
    if options.json is not None:
        save(figures, machine, options.json)
    if options.plot is not None:
        options.draw(figures, machine, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
