"""What a figure was measured on, and whether anything else was running."""

import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from scripts.benchmarks.processes.daemon import ROOT

BUSY = 0.5
"""Load average over the last minute, a core, from which on figures say little."""


def describe_machine() -> dict[str, str]:
    """Facts by name, for people and for JSON."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load average before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "numpy")},
    }


def busy() -> str | None:
    """A warning where others use the machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < BUSY * cores:
        return None
    return f"the machine is busy (load {load:.1f} on {cores} cores): every figure will be too low"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
