"""Tokens per second of several requests together."""

from collections.abc import Sequence

from ipc.benchmark.timeline import Timeline


def throughput(timelines: Sequence[Timeline]) -> float:
    """Tokens out per second, from the first request sent to the last token received."""
    span = max(timeline.last_at for timeline in timelines) - min(timeline.sent_at for timeline in timelines)
    return sum(timeline.tokens for timeline in timelines) / span


def decode_rate(timelines: Sequence[Timeline]) -> float:
    """Tokens per second while all decode: those after everybody's first token and up to anybody's last, over that time.

    Raises ValueError where there is no such time.
    """
    begin = max(timeline.first_at for timeline in timelines)
    end = min(timeline.last_at for timeline in timelines)
    if end <= begin:
        raise ValueError("the requests never decoded all at once: ask for more tokens, or for fewer requests")
    arrivals = [arrival for timeline in timelines for arrival in timeline.arrivals]
    return sum(count for at, count in arrivals if begin < at <= end) / (end - begin)
