"""How a server is asked, whichever it is."""

from ipc.benchmark.timeline import Timeline
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.processes.child import Child


class Way:
    """To a server: its name, and a client of it in a process of its own."""

    def __init__(self, name: str, client: Child) -> None:
        self.name = name
        self._client = client

    def run(self, workload: Workload) -> list[Timeline]:
        """Send it and wait for all."""
        timelines: list[Timeline] = self._client.ask(workload, list[Timeline])
        return timelines
