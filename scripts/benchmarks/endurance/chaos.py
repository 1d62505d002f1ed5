"""The daemon, clients and a batch, killed with -9 at random points of their work: every output is as if nobody had been.

The points are counted in results that are there, so that however fast the machine is there is always work under way.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from ipc.client import Client
from scripts.benchmarks.figures.figure import Figure, MeasurementFailed, figure
from scripts.benchmarks.processes.daemon import SERVE, environment

PATIENCE = 600.0
"""Seconds after which something is taken for never going to happen."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stopped": {"ignore_eos": False, "stop": ["And so", " the end of it", " found a b"]},
    "half characters": {"temperature": 5},
    "regex": {"structured_outputs": {"regex": "([a-z]{1,9} ){20}[a-z]+\\."}},
    "samples": {"n": 3, "logprobs": 1},
}


class ChaosFailed(MeasurementFailed):
    """What was killed did not come back, or something came out otherwise than undisturbed; the message says what."""


class Phoenix:
    """A daemon that is started again when it has been killed."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.address = f"ipc://{directory}/o.sock"
        self._log = (directory / "log").open("w", encoding="utf-8")
        self._command = [sys.executable, "-c", SERVE, "serve", *settings, "--bind", self.address]

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def kill(self) -> None:
        """Without a warning; the next one begins to start."""
        self._process.kill()
        self._process.wait()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env=environment(), stdin=subprocess.DEVNULL, stderr=self._log, stdout=self._log
        )


def measure_chaos(
    seconds: float,
    *settings: str,
    lines: int = 140,
    max_tokens: int = 250,
    clients: int = 2,
    kills: int = 3,
    seed: int = 0,
) -> Iterator[Figure]:
    """Rounds until the time is up: all lines asked by each client and by a batch, each killed so often, as is the daemon.

    Raises ChaosFailed for the first output that is not as it was undisturbed.
    """
    rng, rounds, killed = random.Random(seed), 0, 0
    with TemporaryDirectory(prefix="odriver-chaos-") as name, Phoenix(Path(name), *settings) as daemon:
        directory = Path(name)
        source = directory / "in.jsonl"
        source.write_text("".join(f"{json.dumps(line)}\n" for line in _lines(lines, max_tokens)), encoding="utf-8")
        undisturbed = _Asker(_batch, daemon.address, source, directory / "undisturbed.jsonl", lines)
        Client(daemon.address, PATIENCE).close()  # when it is ready, which a batch does not wait for
        undisturbed.run([])
        until = time.monotonic() + seconds
        while rounds == 0 or time.monotonic() < until:
            commands = [_client] * clients + [_batch]
            askers = [
                _Asker(command, daemon.address, source, directory / f"{rounds}-{number}.jsonl", lines)
                for number, command in enumerate(commands)
            ]
            killed += _round(daemon, askers, lines, kills, rng)
            for asker in askers:
                _compare(undisturbed.outputs(), asker.outputs())
            rounds += 1
        _check_idle(daemon.address)
    yield figure("chaos", "outputs as undisturbed", "", [rounds * (clients + 1) * lines])
    yield figure("chaos", "kills of the daemon", "", [rounds * kills])
    yield figure("chaos", "kills of clients and batches", "", [killed])


class _Asker:
    """A process that has lines answered into a file of its own, and does what is missing when it is started again."""

    def __init__(self, command: Callable[..., list[str]], address: str, source: Path, target: Path, lines: int) -> None:
        self._command = command(address, str(source), str(target))
        self._target = target
        self._lines = lines
        self._log = target.with_suffix(".log")

    def run(self, points: list[int]) -> int:
        """Until it is done, killed each time that it has so many results; how often it was."""
        until, killed = time.monotonic() + PATIENCE, 0
        while time.monotonic() < until:
            with (
                self._log.open("a", encoding="utf-8") as log,
                subprocess.Popen(self._command, env=environment(), stderr=log) as process,
            ):
                while points and process.poll() is None:
                    if self.count() >= points[0]:
                        process.kill()
                        killed += 1
                        points = points[1:]
                    time.sleep(0.01)
                if process.wait(PATIENCE) == 0:
                    return killed
            if process.returncode > 0 and self.count() == self._lines:
                break  # there are failures among the results
        raise ChaosFailed(f"{' '.join(self._command)} does not end well:\n{self._log.read_text(encoding='utf-8')}")

    def count(self) -> int:
        """Results that are in the file."""
        return self._target.read_bytes().count(b"\n") if self._target.exists() else 0

    def outputs(self) -> list[tuple[Any, ...]]:
        """By name: texts, reasons and tokens; what of a prompt was cached depends on the kills."""
        results = [json.loads(line) for line in self._target.read_text(encoding="utf-8").splitlines()]
        bodies = [(result["custom_id"], result["response"]["body"]) for result in results]
        return sorted(
            (
                name,
                [(choice["text"], choice["finish_reason"]) for choice in body["choices"]],
                body["usage"]["total_tokens"],
            )
            for name, body in bodies
        )


def _round(daemon: Phoenix, askers: list[_Asker], lines: int, kills: int, rng: random.Random) -> int:
    """All askers at once, and the daemon killed meanwhile; how many of the kills were theirs."""

    def points(count: int) -> list[int]:
        """How many results there are to be, but not so many that the work may be done before the kill."""
        return sorted(rng.sample(range(1, 3 * count // 4), kills))

    with ThreadPoolExecutor(len(askers)) as threads:
        running = [threads.submit(asker.run, points(lines)) for asker in askers]
        for point in points(lines * len(askers)):
            _wait_for(lambda least=point: sum(asker.count() for asker in askers) >= least)  # type: ignore[misc]
            daemon.kill()
        return sum(one.result() for one in running)


def _lines(count: int, max_tokens: int) -> list[dict[str, Any]]:
    kinds = list(KINDS.items())
    return [
        {
            "custom_id": f"{kinds[number % len(kinds)][0]} {number}",
            "prompt": f"Once upon a time, in the year {number}, there was",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **kinds[number % len(kinds)][1],
        }
        for number in range(count)
    ]


def _client(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "scripts.benchmarks.endurance.chaos_client", *arguments]


def _batch(address: str, source: str, target: str) -> list[str]:
    return [sys.executable, "-c", SERVE, "batch", source, target, "--connect", address, "--max-concurrency", "16"]


def _wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > until:
            raise ChaosFailed(f"no more results came for {PATIENCE:g} s")
        time.sleep(0.01)


def _compare(expected: list[tuple[Any, ...]], got: list[tuple[Any, ...]]) -> None:
    if got != expected:
        different = [one for one in got if one not in expected] or [one for one in expected if one not in got]
        raise ChaosFailed(f"{len(got)} outputs of {len(expected)}, of which is otherwise: {different[:1]}")


def _check_idle(address: str) -> None:
    """Nothing is left of what was killed."""
    with Client(address, PATIENCE) as client:
        _wait_for(lambda: not client.status()["open_requests"])
        _wait_for(lambda: client.status()["pages_owned"] == 0)
