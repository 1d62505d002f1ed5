"""Other servers, on the same checkpoint, asked over HTTP as our gateway is: llama.cpp's and vLLM."""

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.clients.way import Way
from scripts.benchmarks.clients.workload import System
from scripts.benchmarks.figures.figure import MeasurementFailed
from scripts.benchmarks.peers.gguf_file import write_gguf
from scripts.benchmarks.processes.child import Child
from scripts.processes import free_port

CLIENT = "scripts.benchmarks.clients.http_client"
HOST = "127.0.0.1"
ROWS, CONTEXT = 32, 4096
"""Sequences at once, and tokens of one of them."""
TOKENS = 16384
"""Of all sequences, in llama.cpp's cache."""
START_SECONDS = 600
"""vLLM compiles for minutes."""


class PeerFailed(MeasurementFailed):
    """A server that did not start; the message ends with its log."""


@contextmanager
def llama_cpp(program: str, model: Path) -> Iterator[System]:
    """``program`` is llama-server."""
    with tempfile.TemporaryDirectory(prefix="odriver-bench-") as directory:
        path = Path(directory, "model.gguf")
        write_gguf(model, path)
        threads = str(len(os.sched_getaffinity(0)))
        command = [program, "-m", str(path), "-t", threads, "-np", str(ROWS), "-c", str(TOKENS), "--kv-unified"]
        with _served([*command, "--no-webui"], {}) as client:
            yield Way("llama.cpp", client)


@contextmanager
def vllm(program: str, model: Path) -> Iterator[System]:
    """``program`` is the ``vllm`` of an environment for CPUs."""
    command = [program, "serve", str(model), "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(ROWS), "--no-enable-prefix-caching"]
    with _served(command, {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}) as client:
        yield Way("vLLM", client)


@contextmanager
def _served(command: Sequence[str], environment: dict[str, str]) -> Iterator[Child]:
    """A client of this server, which is given a port that no other has."""
    port = free_port()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as server,
    ):
        try:
            _wait_until_healthy(server, port)
            with Child(CLIENT, f"http://{HOST}:{port}") as client:
                yield client
        except PeerFailed as error:
            log.seek(0)
            raise PeerFailed(f"{command[0]} {error}:\n{log.read()}") from None
        finally:
            server.terminate()


def _wait_until_healthy(server: "subprocess.Popen[bytes]", port: int) -> None:
    """Until it answers. Raises PeerFailed if it ends before, or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            ended = server.wait(0.2)
        except subprocess.TimeoutExpired:
            if _is_healthy(port):
                return
        else:
            raise PeerFailed(f"ended with exit code {ended} before it was ready")
    raise PeerFailed(f"was not ready after {START_SECONDS} s")


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
