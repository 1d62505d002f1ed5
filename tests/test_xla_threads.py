"""The threads of XLA on a CPU: few beside our kernels', and as many as sums over virtual devices need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from xla_flags import xla_flags

from engine.devices import xla_threads
from engine.devices.xla_threads import limit_xla_threads

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("given", "flags", "cores", "threads"),
    [
        (None, "", 8, "7"),
        (None, "", 1, "1"),
        ("3", "", 8, "3"),
        ("all", "", 8, "7"),
        (None, xla_flags(devices=2), 2, "6"),
        (None, xla_flags(devices=2), 16, "15"),
        (None, f"{xla_flags(devices=2)} {xla_flags(devices=8)}", 2, "24"),
        ("2", xla_flags(devices=2), 2, "6"),
        ("8", xla_flags(devices=2), 2, "8"),
    ],
)
def test_there_are_as_many_as_the_devices_need(
    monkeypatch: pytest.MonkeyPatch, given: str | None, flags: str, cores: int, threads: str
) -> None:
    """One fewer than cores, or what the operator says, but never so few that devices wait for each other for ever."""
    monkeypatch.setattr(xla_threads, "usable_cores", lambda: cores)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NPROC", given or "")

    limit_xla_threads()

    assert os.environ["NPROC"] == threads


def test_devices_do_not_wait_for_each_other_for_ever() -> None:
    """On one core, with as much dispatched ahead as XLA takes, from as many threads as we have: XLA ends a process
    whose sums wait for long."""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=2)}

    command = [sys.executable, Path(__file__).parent / "dispatch_ahead.py"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert run.returncode == 0, run.stderr
