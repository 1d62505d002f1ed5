"""The clients' side of a measurement, a process of its own: all prompts of a workload sent, through Client."""

import sys

import msgspec

from ipc.benchmark.timeline import Timeline
from ipc.benchmark.workload import send
from ipc.client import Client
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.processes.child import answer_all

PATIENCE = 60.0
"""Seconds that a daemon which is started beside it may take to be there."""


def main() -> None:
    """Serve as a child: a Workload a line, answered by the Timelines of its requests."""
    with Client(sys.argv[1], timeout=PATIENCE) as client:
        answer_all(lambda question: _run(client, msgspec.convert(question, Workload)))


def _run(client: Client, workload: Workload) -> list[Timeline]:
    params = {
        "max_tokens": workload.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "structured_outputs": workload.structured_outputs,
    }
    times = [workload.interval * number for number in range(len(workload.prompts))]
    return send(client, workload.prompts, params, times=times, stream=workload.stream)


if __name__ == "__main__":
    main()
