"""Which accelerators this machine has, and which processes hold them. Nothing is opened: a TPU takes one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

DEVICES = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*")
"""In /dev: TPUs by their own driver, TPUs by VFIO, GPUs."""
TPU_LOCK = Path("/tmp/libtpu_lockfile")
"""What libtpu locks for as long as a process uses the TPUs."""


def devices(dev: Path = Path("/dev")) -> list[Path]:
    """The accelerators that there are."""
    return sorted(path for pattern in DEVICES for path in dev.glob(pattern))


def holders(paths: list[Path], proc: Path = Path("/proc")) -> dict[int, str]:
    """The processes that have any of these open, by id, with their names; those of other users only root sees."""
    wanted = {str(path) for path in paths}
    return {
        int(process.name): _name(process)
        for process in proc.glob("[0-9]*")
        if process.name != str(os.getpid()) and any(target in wanted for target in _open_files(process))
    }


def unusable_lock(lock: Path = TPU_LOCK) -> bool:
    """Whether there is a lock that nobody holds and that we cannot take either: another user's process left it."""
    if not lock.exists() or holders([lock]):
        return False
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _open_files(process: Path) -> Iterator[str]:
    try:
        for descriptor in (process / "fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:  # it has ended, or is none of ours
        return


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
