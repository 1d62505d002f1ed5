"""What is attacked: a daemon with few open files allowed, and a gateway before it or keys in front of it."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from engine.hub.names import DEMO_MODEL
from ipc.client import Client
from ipc.wire import keys
from scripts.benchmarks.hostile.keyed import POOR
from scripts.benchmarks.hostile.peer import connected
from scripts.benchmarks.hostile.registry import DAEMON, GATEWAY, KEYED, Door
from scripts.benchmarks.processes.daemon import Daemon, environment
from scripts.processes import free_port

OPEN_FILES = 1024
LIMITED = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({OPEN_FILES},) * 2); "
    "from ipc.main import main; sys.exit(main())"
)
TEMPLATE = (
    "{%- for tool in tools or [] -%}<|system|>{{ tool | tojson }}<|end|>{%- endfor -%}"
    "{%- for message in messages -%}<|user|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}{{ call.function.arguments | tojson }}{%- endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""As those of models that know tools have it; the one of the model we ship does not."""
PATIENCE = 60.0
REST = 20.0
"""Seconds in which all that an attack had is to be gone."""
MORE_MEGABYTES, MORE_FILES = 128.0, 48
"""That may be held after an attack: malloc keeps what may be wanted again, and the few processes that grammars are compiled
and followed in are made when they are first needed, and stay.
"""


class Held(NamedTuple):
    """What processes hold together."""

    megabytes: float
    """Their share of memory (PSS)."""
    files: int

    @classmethod
    def by(cls, pids: list[int]) -> "Held":
        """These and their children."""
        megabytes, files = 0.0, 0
        for pid in pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.Error):
                        megabytes += each.memory_full_info().pss / 2**20
                        files += each.num_fds()
        return cls(megabytes, files)


class Stand:
    """From entering to leaving; ready when entered."""

    def __init__(self, *, keyed: bool) -> None:
        self._keyed = keyed
        self._gateway: subprocess.Popen[bytes] | None = None
        self.doors: dict[str, Door] = {}
        """By target."""
        self.key = ""
        """The file of the honest clients' key."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="odriver-hostile-")))
            model = _model(directory / "hostile")
            metrics = free_port()
            settings = ["--metrics-port", str(metrics)]
            named = {}
            if self._keyed:
                for name, limits in (
                    ("honest", {"control": True}),
                    ("plain", {}),
                    ("poor", {"tokens_per_minute": POOR}),
                ):
                    named[name] = str(directory / f"{name}.key")
                    keys.new(directory / "keys", name, Path(named[name]), **limits)
                self.key = named.pop("honest")
                settings += ["--keys", str(directory / "keys")]
            self.daemon = stack.enter_context(Daemon(model, *settings, program=LIMITED))
            door = Door(self.daemon.address, metrics=f"127.0.0.1:{metrics}", keys=named, logs=[self.daemon.log])
            self.doors[KEYED if self._keyed else DAEMON] = door
            if not self._keyed:
                self._open_gateway(stack, directory, door)
            self.control = stack.enter_context(Client(self.daemon.address, key=self.key or None))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def dead(self) -> str:
        """Who has ended that should not have."""
        processes = {"the daemon": self.daemon.process, "the gateway": self._gateway}
        return ", ".join(
            f"{name} ended ({process.returncode})"
            for name, process in processes.items()
            if process is not None and process.poll() is not None
        )

    def held(self) -> Held:
        """By all there is."""
        return Held.by([self.daemon.pid, *([] if self._gateway is None else [self._gateway.pid])])

    def rest(self, before: Held) -> str:
        """Wait until what an attack had is gone; what is not, if anything, when the time is over."""
        return until(lambda: self._left(before), REST)

    def _left(self, before: Held) -> str:
        status, held = self.control.status(), self.held()
        left = [
            f"{status[name]} {name}" for name in ("open_requests", "running", "waiting", "pages_owned") if status[name]
        ]
        if held.files > before.files + MORE_FILES:
            left.append(f"{held.files} files after {before.files}")
        if held.megabytes > before.megabytes + MORE_MEGABYTES:
            left.append(f"{held.megabytes:.0f} MB after {before.megabytes:.0f}")
        return ", ".join(left)

    def _open_gateway(self, stack: ExitStack, directory: Path, door: Door) -> None:
        port, log = free_port(), directory / "gateway.log"
        url = f"127.0.0.1:{port}"
        with log.open("w", encoding="utf-8") as out:
            arguments = ["gateway", "--connect", door.address, "--port", str(port)]
            self._gateway = subprocess.Popen(
                [sys.executable, "-c", LIMITED, *arguments], env=environment(), stdout=out, stderr=out
            )
        stack.callback(self._gateway.wait)
        stack.callback(self._gateway.kill)
        self.doors[GATEWAY] = Door(door.address, url=url, logs=[*door.logs, str(log)])
        if until(lambda: "" if _answers(url) else "nobody", PATIENCE):
            raise OSError(f"the gateway does not answer: {log.read_text(encoding='utf-8')}")


def _model(directory: Path) -> Path:
    """The model we ship, with a template that knows tools."""
    shutil.copytree(DEMO_MODEL, directory)
    config = directory / "tokenizer_config.json"
    about = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(about | {"chat_template": TEMPLATE}), encoding="utf-8")
    return directory


def _answers(url: str) -> bool:
    try:
        connected(url).close()
    except OSError:
        return False
    return True


def until(missing: Callable[[], str], seconds: float) -> str:
    """Wait until nothing is missing; what is when the time is over."""
    deadline = time.monotonic() + seconds
    while (left := missing()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
