"""Daemons around a fake driver, for tests and for processes that they start: nothing here imports JAX."""

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fake_driver import LIMITS, PATIENCE, FakeDriver
from rich.console import Console

from engine.config import EngineConfig
from engine.exit_codes import FAULT
from engine.progress import Progress
from ipc.process.gateway_process import GatewayProcess
from ipc.service.configuration import DaemonConfig, LiveConfiguration, ReadConfig
from ipc.service.daemon import Daemon
from ipc.service.http_config import HttpConfig
from ipc.service.settings import GATEWAY_OPTIONS, SETTINGS
from ipc.service.start_up import Loaded

Report = Callable[[Progress], None]
Fail = Callable[[str], None]
DESCRIPTION = {"dtype": "float32, weights in int8", "device": "1 x cpu", "operations": "XLA"}


class News:
    """What the daemon tells $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(PATIENCE)

    def until(self, last: str) -> list[str]:
        """Everything up to that."""
        heard = []
        while last not in heard:
            heard.append(self._socket.recv(4096).decode())
        return heard

    def close(self) -> None:
        self._socket.close()


def build_daemon(
    address: str,
    driver: FakeDriver | None = None,
    during_load: Callable[[Report], None] = lambda report: None,
    failures: list[Fail] | None = None,
    drain_timeout: float = PATIENCE,
    read: ReadConfig | None = None,
    gateway: GatewayProcess | None = None,
) -> Daemon:
    """A daemon that need not load its driver; ``during_load`` happens instead, ``failures`` gets the driver's."""

    def load(
        config: EngineConfig, report: Report, end: Callable[[int, str], None], ask_to_stop: Callable[[str, float], None]
    ) -> Loaded:
        del config, ask_to_stop
        during_load(report)
        if failures is not None:
            failures.append(partial(end, FAULT))
        return Loaded(driver or FakeDriver(), "parrot", LIMITS, {"model": "/models/parrot"} | DESCRIPTION)

    console = Console(stderr=True)
    read = read or (lambda: (EngineConfig(), DaemonConfig(bind=address, drain_timeout=drain_timeout), HttpConfig()))
    return Daemon(LiveConfiguration(read, console), console, load, gateway)


def gateway(**options: Any) -> GatewayProcess:
    """One at a free port."""
    defaults = {name: SETTINGS[name].default for name in GATEWAY_OPTIONS}
    return GatewayProcess("127.0.0.1", 0, or_any_port=False, **(defaults | options))
