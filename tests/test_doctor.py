"""What ``odriver doctor`` finds on machines of all kinds."""

import importlib.metadata
import json
import os
import socket
from pathlib import Path

import pytest
from fake_driver import FakeDriver, serving

from ipc import accelerators, cli, doctor, keys
from ipc.doctor import Finding


def build_process(proc: Path, pid: int, name: str, *files: Path) -> None:
    """A process that has these files open, as /proc shows it."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(name + "\n")
    for descriptor, file in enumerate(files):
        (proc / str(pid) / "fd" / str(descriptor)).symlink_to(file)


def test_accelerators_are_found_with_those_who_hold_them(tmp_path: Path) -> None:
    """TPUs of both drivers and GPUs; of the processes those that have one open, but not this one."""
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    (dev / "vfio").mkdir(parents=True)
    for name in ("accel0", "accel1", "vfio/0", "vfio/vfio", "nvidia0", "nvidiactl", "null"):
        (dev / name).touch()
    build_process(proc, 7, "python", dev / "null", dev / "accel1")
    build_process(proc, 8, "bash", dev / "null")
    build_process(proc, os.getpid(), "pytest", dev / "accel0")

    found = accelerators.devices(dev)

    assert [str(path.relative_to(dev)) for path in found] == ["accel0", "accel1", "nvidia0", "vfio/0"]
    assert accelerators.holders(found, proc) == {7: "python"}


def test_an_accelerator_has_to_be_free_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it open is named with the command that ends it; a TPU needs libtpu; none at all is fine."""
    device = tmp_path / "accel0"
    for name in ("accel0", "nvidia0"):
        (tmp_path / name).touch()
    holding: dict[int, str] = {}
    monkeypatch.setattr(accelerators, "holders", lambda devices: holding)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")

    assert doctor.accelerator([]).state == "good"
    assert doctor.accelerator([device]) == Finding("accelerator", "good", f"{device}, free")
    holding |= {7: "python", 9: "jupyter"}
    gpu = doctor.accelerator([tmp_path / "nvidia0"])
    assert gpu[1:3] == ("warning", f"{tmp_path / 'nvidia0'} is shared with python (7), jupyter (9)")
    assert doctor.accelerator([device])[1:] == (
        "bad", f"{device} is in use by python (7), jupyter (9)", "end it: kill 7 9",
    )  # fmt: skip
    holding.clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: importlib.metadata.distribution("no-such").version)
    assert doctor.accelerator([device])[1:] == ("bad", f"{device}, but no libtpu", 'pip install "odriver[tpu]"')
    assert doctor.accelerator([tmp_path / "nvidia0"]).state == "warning"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.accelerator([device]).found == f"{device} may not be opened"


def test_a_lock_that_nobody_holds_is_in_the_way_only_if_we_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libtpu leaves its file behind at each end."""
    lock = tmp_path / "lockfile"
    assert not accelerators.unusable_lock(lock)
    lock.touch()
    assert not accelerators.unusable_lock(lock)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert accelerators.unusable_lock(lock)


def test_versions_are_held_against_what_we_ask_for() -> None:
    """What is missing or out of range is named; extras are not asked for."""
    numpy = importlib.metadata.version("numpy")

    assert doctor.versions(["numpy >=1", 'no-such; extra == "tpu"']).state == "good"
    assert doctor.versions(["numpy <1", "no-such >=2"])[1:3] == ("bad", f"numpy is {numpy}, not <1; no-such is missing")


def test_memory_and_files_may_be_tight() -> None:
    """Weights that don't fit keep a CPU from serving; an accelerator has its own memory."""
    assert doctor.memory(3, 10, on_cpu=True).state == "good"
    assert doctor.memory(8, 10, on_cpu=True).state == "warning"
    assert doctor.memory(11, 10, on_cpu=True).state == "bad"
    assert doctor.memory(11, 10, on_cpu=False).state == "good"
    assert doctor.open_files(256)[1:] == ("warning", "256 at most", "ulimit -n 1024, or more")


def test_an_address_may_be_ours_or_taken_by_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of ours is no obstacle to having one; a program that says nothing is."""
    address = f"ipc://{tmp_path}/o.sock"
    assert doctor.listener(address).state == "good"
    with serving(address, FakeDriver()):
        assert doctor.listener(address)[1:3] == ("warning", f"a daemon serves parrot at {address}")

    monkeypatch.setattr(doctor, "PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        assert doctor.listener(f"tcp://127.0.0.1:{port}").state == "bad"
        assert doctor.listener(f"tcp://127.0.0.1:{port}", asks_for_keys=True).state == "warning"
        assert doctor.metrics_port("127.0.0.1", port).state == "warning"


def test_where_keys_are_asked_for_somebody_should_have_one(tmp_path: Path) -> None:
    """None at all is said, and so is a file that is no key."""
    assert doctor.authorized(tmp_path).state == "warning"
    keys.new(tmp_path, "alice", tmp_path / "alice.key")
    assert doctor.authorized(tmp_path)[1:3] == ("good", f"1 in {tmp_path}")
    (tmp_path / "clients" / "bob.toml").write_text("public = 3")
    assert doctor.authorized(tmp_path).state == "bad"


def test_the_exit_code_says_whether_a_start_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do, as a table or as JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(accelerators, "devices", list)
    bind = ["--bind", f"ipc://{tmp_path}/o.sock"]

    assert cli.main(["doctor", *bind, "--json"]) == 0
    found = {one["check"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert found["model"] == found["cache"] == found["address"] == found["settings"] == "good"

    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["doctor", *bind, str(tmp_path / "no-model")]) == 1
    printed = capsys.readouterr().out
    for words in ("cannot write in", "no-such-compiler", "not a", "directory"):
        assert words in printed
    assert cli.main(["doctor", "--page-size", "0"]) == 1
    assert "page_size must be" in capsys.readouterr().out
