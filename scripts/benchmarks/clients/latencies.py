"""What those who ask wait for, in milliseconds."""

from collections.abc import Sequence

from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.figures.figure import MILLISECONDS


def ttfts(timelines: Sequence[Timeline]) -> list[float]:
    """Of each request the time to its first token."""
    return [MILLISECONDS * timeline.ttft for timeline in timelines]


def itls(timelines: Sequence[Timeline]) -> list[float]:
    """The times between tokens of all requests."""
    return [MILLISECONDS * gap for timeline in timelines for gap in timeline.itls]
