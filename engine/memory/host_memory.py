"""The memory that the host has free for this process."""

from collections.abc import Iterator

import psutil

from caching.control_groups import own_groups


def available_bytes() -> int:
    """What may be taken without swapping, and without more than a container or unit may have."""
    free: int = psutil.virtual_memory().available
    return max(0, min((free, *_left_in_cgroups())))


def _left_in_cgroups() -> Iterator[int]:
    """What is left in the process's own group and in those that it is in, of those with a limit."""
    for place in own_groups():
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
