"""What of the host's memory may be taken."""

from pathlib import Path

import psutil
import pytest

from caching import control_groups
from engine.memory import host_memory


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control groups of a machine without limits, on which this process is in one of two, one in the other."""
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text("1:memory:/elsewhere\n0::/system.slice/odriver.service\n")
    for group in ("system.slice", "system.slice/odriver.service"):
        limited(tmp_path / group, "max", 7)
    return tmp_path


def limited(group: Path, limit: object, taken: int, files: int = 0) -> None:
    """Write what Linux says of a group."""
    group.mkdir(exist_ok=True)
    for name, content in {
        "max": limit,
        "current": taken,
        "stat": f"anon 1\ninactive_file {files}\nactive_file 0\n",
    }.items():
        (group / f"memory.{name}").write_text(f"{content}\n")


def test_the_least_that_is_left_counts(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine, the container and the unit; files that have been read make room."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**9}))

    assert host_memory.available_bytes() == 10**9
    limited(groups / "system.slice", 5000, 1000, 500)
    assert host_memory.available_bytes() == 4500
    limited(groups / "system.slice/odriver.service", 1000, 900)
    assert host_memory.available_bytes() == 100
    limited(groups / "system.slice/odriver.service", 1000, 1200)
    assert host_memory.available_bytes() == 0


@pytest.mark.parametrize("own", ["1:memory:/x\n", "0::/\n", "0::/../../x\n", None])
def test_where_there_are_no_such_limits_the_machine_has_what_it_has(groups: Path, own: str | None) -> None:
    """An older version of Linux or of its groups, none of them, or another namespace."""
    control_groups.OWN.unlink()
    if own is not None:
        control_groups.OWN.write_text(own)
    limited(groups / "system.slice", 1000, 999)

    assert host_memory.available_bytes() > 10**6
