"""scripts/bench fairness: what it makes of the times of two clients."""

import pytest

from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.clients.workload import Prompts
from scripts.benchmarks.fairness import measure_fairness

pytestmark = pytest.mark.thorough


class Waiting:
    """A system that answers the prompts of each workload after so many seconds, on a clock of its own."""

    def __init__(self, *seconds):
        self._seconds = list(seconds)

    def run(self, workload):
        seconds = self._seconds.pop(0)
        sent = [workload.interval * number for number in range(len(workload.prompts))]
        return [Timeline(1, at, [(at + seconds, workload.max_tokens)]) for at in sent]


def test_fairness_is_how_much_longer_the_other_one_waits():
    """20 ms alone, 50 beside the flood; those that were sent after the flood are not counted."""
    other, flooding = Waiting(0.5, 0.02, 0.05), Waiting(1.0)

    figures = {one.name: one for one in measure_fairness("wee", Prompts(300), flooding, other, flood=10, probes=20)}

    assert figures["short ones sent beside the flood"].value == 10
    assert figures["TTFT p99"].value == pytest.approx(50)
    assert figures["TTFT p99"].others == {"alone": pytest.approx(20)}
    assert figures["TTFT p99, times that of alone"].value == pytest.approx(2.5)
