"""The host's share of a step: what is left of it when the model is nothing."""

import tempfile
from collections.abc import Iterator

from ipc.benchmark.timeline import Timeline, percentile
from scripts.benchmarks.clients.rates import throughput
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.figures.figure import MICROSECONDS, MILLISECONDS, Figure, figure
from scripts.benchmarks.processes.child import Child

NULL_MODEL, NULL_DAEMON = "scripts.benchmarks.processes.null_model", "scripts.benchmarks.processes.null_daemon"
CLIENT = "scripts.benchmarks.clients.client"
ROWS = (1, 8, 64, 256)
WAITING = (10, 1000, 10000)
STEPS = 300
STREAMS, STREAM_TOKENS = (1, 16, 64), 1000


def measure_host(repeats: int) -> Iterator[Figure]:
    """Milliseconds a step: the median of a bare loop's for each count of waiting requests, and through the driver."""
    with Child(NULL_MODEL) as child:
        for rows in ROWS:
            for waiting in WAITING:
                question = {"rows": rows, "waiting": waiting, "steps": STEPS}
                runs = [child.ask(question) for _ in range(repeats)]
                name = f"{_rows(rows)}, {waiting:,} waiting"
                for percent in (50, 99):
                    values = [MILLISECONDS * percentile(run, percent) for run in runs]
                    yield figure("host", f"{name}, p{percent}", "ms", values, more_is_better=False)
            values = [MILLISECONDS * child.ask({"rows": rows, "steps": STEPS})[0] for _ in range(repeats)]
            yield figure("host", f"{_rows(rows)}, driver threads and text, mean", "ms", values, more_is_better=False)


def measure_streams(repeats: int) -> Iterator[Figure]:
    """Tokens a second that daemon, socket and client deliver of the null model, and the daemon's processor time for one."""
    for streams in STREAMS:
        with tempfile.TemporaryDirectory(prefix="odriver-bench-") as directory:
            address = f"ipc://{directory}/o.sock"
            with Child(NULL_DAEMON, address, str(streams)) as daemon, Child(CLIENT, address) as client:
                _stream(daemon, client, streams)  # not counted: the first steps compile
                runs = [_stream(daemon, client, streams) for _ in range(repeats)]
        rates, costs = zip(*runs, strict=True)
        name = f"{streams} stream{'s' if streams > 1 else ''} through a client"
        yield figure("host", name, "tok/s", list(rates))
        yield figure("host", f"{name}, the daemon's CPU", "us/tok", list(costs), more_is_better=False)


def _stream(daemon: Child, client: Child, streams: int) -> tuple[float, float]:
    workload, before = Workload([[1] * 128] * streams, STREAM_TOKENS), daemon.ask({}, float)
    timelines = client.ask(workload, list[Timeline])
    used = daemon.ask({}, float) - before
    return throughput(timelines), MICROSECONDS * used / sum(timeline.tokens for timeline in timelines)


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"
