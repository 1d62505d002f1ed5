"""The systems that are measured: our daemon through our client, and others on the same checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ipc.benchmark.timeline import Timeline
from ipc.client import Client
from scripts.benchmarks.clients.way import Way
from scripts.benchmarks.clients.workload import System, Workload
from scripts.benchmarks.peers.http_peers import llama_cpp, vllm
from scripts.benchmarks.processes.child import Child
from scripts.benchmarks.processes.daemon import Daemon

CLIENT, TORCH = "scripts.benchmarks.clients.client", "scripts.benchmarks.peers.torch_peer"
OVER_HTTP = {"llama.cpp": llama_cpp, "vllm": vllm}
"""Those that are servers; each takes its program and the model."""
MODES = ("generate", "continuous batching")
"""Of transformers."""
PEERS = ("transformers", *OVER_HTTP)


class Ours(Way):
    """A daemon of ours, and the client in a process of its own."""

    name = "oDriver"

    def __init__(self, daemon: Daemon, client: Child) -> None:
        super().__init__(self.name, client)
        self._daemon = daemon

    def client(self) -> Client:
        """A client in this process, for what isn't timed to the millisecond."""
        return self._daemon.client()

    def status(self) -> dict[str, float]:
        """The daemon's numbers."""
        with self.client() as client:
            return client.status()


class Transformers:
    """transformers in its own process, with no sockets between it and who asks, to its favour."""

    def __init__(self, child: Child, mode: str) -> None:
        self.name = f"transformers {mode}"
        self._child = child

    def run(self, workload: Workload) -> list[Timeline]:
        """Send it and wait for all; it knows no sockets, so streaming is no matter."""
        question = {"prompts": workload.prompts, "max_tokens": workload.max_tokens}
        timelines: list[Timeline] = self._child.ask(question, list[Timeline])
        return timelines


@contextmanager
def serving(
    model: Path, settings: list[str], programs: Mapping[str, str] | None = None
) -> Iterator[tuple[Ours, list[System]]]:
    """Ours, ready, and the others to compare with: those of PEERS whose programs are given."""
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(model, *settings))
        ours = Ours(daemon, stack.enter_context(Child(CLIENT, daemon.address)))
        others: list[System] = []
        for peer, program in (programs or {}).items():
            if peer in OVER_HTTP:
                others.append(stack.enter_context(OVER_HTTP[peer](program, model)))
                continue
            for mode in MODES:
                child = stack.enter_context(Child(TORCH, str(model), mode, python=program))
                others.append(Transformers(child, mode))
        yield ours, others


@contextmanager
def two_clients(model: Path, settings: list[str]) -> Iterator[tuple[Ours, Ours]]:
    """One daemon, ready, and two clients of it that can be asked at a time."""
    with (
        Daemon(model, *settings) as daemon,
        Child(CLIENT, daemon.address) as first,
        Child(CLIENT, daemon.address) as second,
    ):
        yield Ours(daemon, first), Ours(daemon, second)
