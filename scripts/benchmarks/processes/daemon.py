"""A daemon to measure: `odriver serve` in a process of its own, at an address that nobody else has."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ipc.client import Client
from scripts.benchmarks.figures.figure import MeasurementFailed

ROOT = Path(__file__).resolve().parents[3]
SERVE = "import sys; from ipc.commands.cli import main; sys.exit(main())"
STOP_TIMEOUT = 10.0


def environment() -> dict[str, str]:
    """Of a process of this checkout, which no configuration of this machine is to reach."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "ODRIVER_CONFIG": os.devnull}


class DaemonFailed(MeasurementFailed):
    """The daemon ended before it was ready; the message ends with its log."""


class Daemon:
    """Serves from entering to leaving, and is ready when entered. Settings are those of ``odriver serve``.

    ``program`` is what Python is to run instead of that command.
    """

    def __init__(
        self, model: Path, *settings: str, environment: Mapping[str, str] | None = None, program: str = SERVE
    ) -> None:
        self.stages: list[tuple[float, str]] = []
        """When each stage of the start began, in seconds after the process, and its name; the last is "ready"."""
        self._command = [sys.executable, "-c", program, "serve", str(model.resolve()), *settings]
        self._environment = environment or {}

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="odriver-bench-")
        self.address = f"ipc://{self._directory.name}/o.sock"
        self._log = Path(self._directory.name, "log").open("w", encoding="utf-8")
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(f"{self._directory.name}/notify")
        began = time.monotonic()
        self._process = subprocess.Popen(
            [*self._command, "--bind", self.address],
            env={**environment(), "NOTIFY_SOCKET": self._notices.getsockname(), **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self._wait_until_ready(began)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    @property
    def seconds_to_ready(self) -> float:
        """How long the start took, from the process's first moment."""
        return self.stages[-1][0]

    def seconds_of(self, stage: str) -> float:
        """How long a stage of the start took; 0 of one that there was not."""
        names = [name for _, name in self.stages]
        if stage not in names:
            return 0.0
        index = names.index(stage)
        return self.stages[index + 1][0] - self.stages[index][0]

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """For whoever is to see how it ends."""
        return self._process

    @property
    def log(self) -> str:
        """The file that it logs to."""
        return self._log.name

    def client(self) -> Client:
        """A client in this process, for questions; what is measured is asked from another one."""
        return Client(self.address)

    def _wait_until_ready(self, began: float) -> None:
        """Follow what it tells systemd: a stage, ``done of total units`` many times, and at last READY=1."""
        self.stages.append((0.0, "imports"))
        ended = os.pidfd_open(self._process.pid)
        try:
            while self.stages[-1][1] != "ready":
                readable, _, _ = select.select([self._notices.fileno(), ended], [], [])
                if self._notices.fileno() not in readable:
                    log = Path(self.log).read_text(encoding="utf-8")
                    raise DaemonFailed(f"the daemon ended before it was ready:\n{log}")
                self._hear(self._notices.recv(4096).decode(), time.monotonic() - began)
        finally:
            os.close(ended)

    def _hear(self, notice: str, at: float) -> None:
        if notice == "READY=1":
            self.stages.append((at, "ready"))
            return
        stage, _, amount = notice.removeprefix("STATUS=").partition(": ")
        done, _, total = amount.partition(" of ")
        if total and stage != self.stages[-1][1]:
            self.stages.append((at, stage))
        if stage == "compiling" and done == total.split()[0]:
            self.stages.append((at, "pages and warm-up"))

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._notices.close()
        self._log.close()
        self._directory.cleanup()
