"""When the tokens of a request came, and the figures that follow from many of them.

Figures are named as those of ``vllm bench serve`` and mean the same: TTFT is the time to the first
token, TPOT that of each further one on average, ITL the time between one piece of an answer and
the next, E2EL that of the whole request.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np


class Timeline(msgspec.Struct):
    """One request. Times are in seconds of CLOCK_MONOTONIC, which a machine's processes share."""

    prompt_tokens: int
    sent_at: float
    arrivals: list[tuple[float, int]] = []
    """Arrival and number of tokens of each piece of the answer that has any."""
    error: str | None = None
    """Why there was no (whole) answer."""

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_at(self) -> float:
        """When the first token came."""
        return self.arrivals[0][0]

    @property
    def last_at(self) -> float:
        """When the last token came."""
        return self.arrivals[-1][0]

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.first_at - self.sent_at

    @property
    def itls(self) -> list[float]:
        """Seconds between a piece and the next."""
        times = [at for at, _ in self.arrivals]
        return [after - before for before, after in pairwise(times)]


def completed(timelines: Iterable[Timeline]) -> list[Timeline]:
    """Requests that got an answer."""
    return [timeline for timeline in timelines if timeline.error is None and timeline.arrivals]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation, as numpy does it; 0 of no values."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


def load_figures(timelines: Sequence[Timeline], duration: float) -> dict[str, float]:
    """The figures of ``vllm bench serve`` for requests that took ``duration`` seconds together."""
    done = completed(timelines)
    inputs, outputs = sum(one.prompt_tokens for one in done), sum(one.tokens for one in done)
    figures: dict[str, float] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    figures |= _distribution("ttft", [one.ttft for one in done])
    figures |= _distribution(
        "tpot", [(one.last_at - one.first_at) / (one.tokens - 1) for one in done if one.tokens > 1]
    )
    figures |= _distribution("itl", [gap for one in done for gap in one.itls])
    figures |= _distribution("e2el", [one.last_at - one.sent_at for one in done])
    return figures


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    milliseconds = [1000 * value for value in seconds] or [0.0]
    return {
        f"mean_{name}_ms": float(np.mean(milliseconds)),
        f"median_{name}_ms": percentile(milliseconds, 50),
        f"std_{name}_ms": float(np.std(milliseconds)),
        f"p99_{name}_ms": percentile(milliseconds, 99),
    }
