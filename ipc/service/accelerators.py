"""The machine's accelerators, and the processes that hold them. It takes none of them."""

import fcntl
import getpass
import os
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

GOOGLE = "0x1ae0"
"""Google's vendor id on the PCI bus. VFIO passes on devices of other vendors, too."""
TPU_LOCK = Path("/tmp/libtpu_lockfile")
"""The file that libtpu locks (lockf) while a process uses the TPUs, and does not remove."""
FLOCK = "hhqqi0q"
"""``struct flock`` of fcntl(2): type, whence, start, length, process; as 64-bit Linux has it."""
LONGEST_COMMAND = 80


class Holder(NamedTuple):
    """A process that holds a device; ``since`` is in seconds since 1970, "?" is unknown."""

    pid: int
    command: str
    user: str
    since: float

    def __str__(self) -> str:
        if self.user == "?":
            return f"process {self.pid}" if self.pid > 0 else "a process of another container"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"process {self.pid} of {self.user} since {since}: {self.command}"


class Obstacle(NamedTuple):
    """Why the TPUs are not available, and the command that changes it."""

    found: str
    advice: str
    passes: bool
    """Whether it may go away by itself."""


def devices(root: Path = Path("/")) -> list[Path]:
    """The accelerators of this machine."""
    return tpus(root) + gpus(root)


def tpus(root: Path) -> list[Path]:
    """The device files of TPUs: their own driver's, or VFIO's where the group's device is Google's.

    scripts/environment.sh looks for the same.
    """
    groups = [path for path in (root / "dev" / "vfio").glob("[0-9]*") if _is_googles(root, path.name)]
    return sorted((*(root / "dev").glob("accel[0-9]*"), *groups))


def gpus(root: Path) -> list[Path]:
    """The device files of NVIDIA's GPUs."""
    return sorted((root / "dev").glob("nvidia[0-9]*"))


def holders(paths: list[Path]) -> list[Holder]:
    """The processes that have any of these open; those of other users only root sees."""
    wanted = {str(path) for path in paths}
    return [
        _holder(int(process.name))
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda process: int(process.name))
        if process.name != str(os.getpid()) and any(target in wanted for target in _open_files(process))
    ]


def tpu_obstacle(paths: list[Path], lock: Path) -> Obstacle | None:
    """Why libtpu cannot open the TPUs: a process with devices or lock, or a foreign lock."""
    found = {holder.pid: holder for holder in (*_lock_holders(lock), *holders(paths))}
    if found:
        return Obstacle(f"the TPU is in use by {'; by '.join(map(str, found.values()))}", end_of(found.values()), True)
    if _is_refused(lock):
        return Obstacle(f"the TPU is free, but {lock} is of {_owner(lock)}, who left it", f"sudo rm {lock}", False)
    return None


def refusal(reason: str, paths: list[Path], lock: Path = TPU_LOCK) -> Obstacle:
    """The obstacle that JAX met when it was to take these devices, and called so."""
    tpus = [path for path in paths if not path.name.startswith("nvidia")]
    unseen = f"sudo lsof -w {' '.join(map(str, [lock, *tpus]))}, which names the process that has it, if there is one"
    return tpu_obstacle(tpus, lock) or Obstacle(f"JAX cannot take the accelerator: {reason}", unseen, True)


def end_of(processes: Collection[Holder]) -> str:
    """The command that ends these."""
    sudo = "" if all(process.user == getpass.getuser() for process in processes) else "sudo "
    return f"{sudo}kill {' '.join(str(process.pid) for process in processes)}"


def _is_googles(root: Path, group: str) -> bool:
    """Whether a device of this IOMMU group is."""
    vendors = (root / "sys" / "kernel" / "iommu_groups" / group / "devices").glob("*/vendor")
    return any(vendor.read_text().strip() == GOOGLE for vendor in vendors)


def _lock_holders(lock: Path) -> list[Holder]:
    """The process that holds the lock; a process of another container has no number here."""
    try:
        with lock.open("rb") as file:
            asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return []
    return [] if kind == fcntl.F_UNLCK else [_holder(pid)]


def _is_refused(lock: Path) -> bool:
    """Whether libtpu could not open the existing lock file.

    It opens it with O_CREAT, which Linux denies everybody, even root, for another user's file in
    /tmp (fs.protected_regular).
    """
    if not lock.exists():
        return False
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW))
    except OSError:
        return True
    return False


def _open_files(process: Path) -> Iterator[str]:
    try:
        for descriptor in (process / "fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:  # it has ended, or is none of ours
        return


def _holder(pid: int) -> Holder:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        return Holder(pid, command[:LONGEST_COMMAND], process.username(), process.create_time())
    except (psutil.Error, ValueError):
        return Holder(pid, "?", "?", 0.0)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (OSError, KeyError):
        return "another user"
