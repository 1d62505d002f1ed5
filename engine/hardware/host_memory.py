"""The memory that the host has free for this process."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's second version of control groups, in which containers and units of systemd have their limits."""


def available_bytes() -> int:
    """What may be taken without swapping, and without more than a container or unit may have."""
    free: int = psutil.virtual_memory().available
    return max(0, min((free, *_left_in_cgroups())))


def _left_in_cgroups() -> Iterator[int]:
    """What is left in the process's own group and in those that it is in, of those with a limit."""
    try:
        own = next(
            (line[len("0::/") :] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::/")), None
        )
    except OSError:
        return  # no Linux
    if own is None:
        return
    group = CGROUPS / own
    for place in (group, *group.parents):
        if not place.is_relative_to(CGROUPS):
            return
        try:
            limit = (place / "memory.max").read_text().strip()
            if limit != "max":
                taken = int((place / "memory.current").read_text())
                yield int(limit) - taken + _reclaimable((place / "memory.stat").read_text())
        except OSError:
            continue  # the root has no limit, and a process in a namespace does not see all


def _reclaimable(stat: str) -> int:
    """Bytes of files that have been read, which make room for others."""
    numbers = dict(line.split() for line in stat.splitlines() if line)
    return int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))
