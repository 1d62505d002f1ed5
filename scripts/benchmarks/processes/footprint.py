"""What a process holds: threads, open files and memory."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Footprint:
    """At one moment."""

    threads: int
    files: int
    megabytes: float
    """Resident."""

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Its own, without its children's."""
        process = psutil.Process(pid)
        return cls(process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20)
