"""``odriver doctor --tpu``: measures this machine's devices, for a report to send back."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError, DevicesUnavailable
from ipc.process.logs import stderr_console
from ipc.process.tables import facts_table, plain, show, words_table
from ipc.service import accelerators, terminal
from ipc.service.settings import configs, held

MARKS = {"good": "[green]✓", "bad": "[red]✗", "not measured": "[yellow]-", "measured": ""}


def run(flags: Mapping[str, Any], path: Path | None, *, as_json: bool) -> int:
    """Measure and print; with a ``path``, write the report there as JSON too.

    Returns the exit code: 1 if something is bad. Raises ConfigurationError.
    """
    config, *_ = configs(held(flags))
    if path is not None:
        try:
            path.write_text("")  # not after minutes
        except OSError as error:
            raise ConfigurationError(f"the report cannot be written: {error}") from None
    from engine.hardware.report import examine_hardware
    from engine.hub.obtain import obtained

    try:
        with terminal.start_up(stderr_console()) as shown:
            report = examine_hardware(obtained(config, shown.show), shown.show)
    except DevicesUnavailable as error:
        obstacle = accelerators.refusal(str(error), accelerators.devices())
        print(f"odriver: {obstacle.found}. What to do: {obstacle.advice}", file=sys.stderr)
        return os.EX_UNAVAILABLE
    written = msgspec.json.format(msgspec.json.encode(report)).decode()
    if path is not None:
        path.write_text(f"{written}\n")
    if as_json:
        print(written)
    else:
        facts = facts_table("This machine")
        for name, fact in report.facts.items():
            facts.add_row(name, plain(fact))
        table = words_table("What it does", "", "", "", "measured", "expected", "")
        for one in report.measurements:
            table.add_row(
                MARKS[one.state], plain(one.section), plain(one.what), _number(one.value, one.unit),
                _number(one.expected, one.unit), plain(f"not measured: {one.note}" if one.state == "not measured" else one.note),
            )  # fmt: skip
        show(facts, table)
    return 0 if report.is_good else 1


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}".strip()
