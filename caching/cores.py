"""How many cores this process may use."""

import os
from collections.abc import Iterator
from contextlib import suppress

from caching.control_groups import own_groups


def usable_cores() -> int:
    """The cores that it may run on, or as many as a container or unit has the time of, where that is fewer; at least 1.

    With more threads than that, Linux stops all of them for the rest of each tenth of a second once
    they have had their time, and who has waited for others in a loop has spent it.
    """
    return max(1, min((len(os.sched_getaffinity(0)), *map(int, _quotas()))))


def _quotas() -> Iterator[float]:
    """Cores' time in ``cpu.max`` of groups that have a limit: ``docker run --cpus``, Kubernetes' limits, CPUQuota=."""
    for group in own_groups():
        with suppress(OSError):  # the root has no limit, and a process in a namespace does not see all
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
