"""The cores that threads are started for, and the team of the kernels' threads."""

import os
import subprocess
from pathlib import Path

import pytest
from kernels_needed import kernels_needed

from caching import control_groups, cpu_kernels
from caching.cores import usable_cores


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's control group, in another, on a machine of eight cores."""
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "own").write_text("0::/pod/container\n")
    (tmp_path / "pod/container").mkdir(parents=True)
    return tmp_path / "pod/container"


@pytest.mark.parametrize(
    ("own", "outer", "cores"),
    [
        (None, None, 8),
        ("max 100000", "max 100000", 8),
        ("400000 100000", None, 4),
        ("400000 100000", "250000 100000", 2),
        ("max 100000", "1600000 100000", 8),
        ("50000 100000", None, 1),
    ],
)
def test_a_container_has_the_cores_of_its_limit(group: Path, own: str | None, outer: str | None, cores: int) -> None:
    """Whole ones, and one at least; the least limit of the groups that it is in counts."""
    for place, limit in ((group, own), (group.parent, outer)):
        if limit is not None:
            (place / "cpu.max").write_text(f"{limit}\n")

    assert usable_cores() == cores


@pytest.mark.thorough
@pytest.mark.parametrize(("cores", "callers"), [(1, 3), (4, 1), (5, 7)])
def test_each_task_is_done_once_whoever_calls(cores: int, callers: int, tmp_path: Path) -> None:
    """With more threads than cores, more callers than loops, loops in loops, and helpers that sleep."""
    with kernels_needed():
        compiler = cpu_kernels.compiler()
    source, program = Path(__file__).parent / "callers.cc", tmp_path / "callers"
    flags = ("-std=c++17", "-O2", f"-I{cpu_kernels.HEADERS}", "-pthread")
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)

    subprocess.run([program, str(cores), str(callers), "1000"], check=True)
