"""scripts/bench arrivals: what it makes of the times of streams and of the prompts beside them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.arrivals import ARRIVING, LONG_OUTPUT, SHORT_OUTPUT, STREAMS, measure_arrivals
from scripts.benchmarks.clients.workload import Prompts

pytestmark = pytest.mark.thorough


class Streaming:
    """A system whose tokens come after a first gap, and then after others of one length but for the second."""

    def __init__(self, first, second, further):
        self._gaps = first, second, further

    def run(self, workload):
        first, second, further = self._gaps
        times = [first, first + second, *(first + second + further * n for n in range(1, workload.max_tokens - 1))]
        return [Timeline(1, 0.0, [(at, 1) for at in times]) for _ in workload.prompts]

    @contextmanager
    def client(self):
        yield SimpleNamespace(status=lambda: {"running": STREAMS})


def test_arrivals_are_judged_by_the_streams_gaps_and_the_prompts_first_tokens():
    """A gap of 8 s among 382 of 10 ms is none of the slowest hundredth; first tokens come after 2 s."""
    streams, arriving = Streaming(1.0, 8.0, 0.01), Streaming(2.0, 0.02, 0.02)

    figures = {one.name: one for one in measure_arrivals("wee", Prompts(300), streams, arriving, 1)}

    assert figures["ITL p50 of the streams"].value == pytest.approx(10)
    assert figures["ITL p99 of the streams"].value == pytest.approx(10)
    assert figures["ITL p99, times p50"].value == pytest.approx(1)
    assert figures["TTFT p50 of the prompts"].value == figures["TTFT p99 of the prompts"].value == pytest.approx(2000)
    tokens = STREAMS * LONG_OUTPUT + ARRIVING * SHORT_OUTPUT
    assert figures["all"].value == pytest.approx(tokens / (9 + 0.01 * (LONG_OUTPUT - 2)))
