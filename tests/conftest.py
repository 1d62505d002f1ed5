"""JAX is made strict before any test imports it: no silent promotion of dtypes or ranks, and two CPU devices.

No configuration file of this machine holds either.
"""

import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xla_flags import QUICK, xla_flags

# A shell starts its background jobs with SIGINT ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SETTINGS = re.compile(
    r"(ODRIVER|HF|OTEL|GOOGLE|GCLOUD|STORAGE_EMULATOR|XDG|TPU)_|.*_proxy$|"
    r"(COLUMNS|LINES|TERM|NO_COLOR|FORCE_COLOR|NOTIFY_SOCKET|INVOCATION_ID|JOURNAL_STREAM|CREDENTIALS_DIRECTORY|"
    r"PYTHONDONTWRITEBYTECODE)$",
    re.IGNORECASE,
)
"""Variables by which a machine or a shell has a say in what is run here; the tests find none of them set."""
for variable in filter(SETTINGS.match, tuple(os.environ)):
    if variable != "ODRIVER_CPU_ISA" and "PYTEST_XDIST_WORKER" not in os.environ:
        del os.environ[variable]
# readline, which pytest imports, sets these for processes that are started, and os.environ does not show them.
os.unsetenv("COLUMNS")
os.unsetenv("LINES")
# or else each process that a test starts compiles all modules: five seconds for a daemon
sys.dont_write_bytecode = False

os.environ["ODRIVER_CONFIG"] = os.devnull  # not what this machine's own daemon is configured with
os.environ["NO_GCE_CHECK"] = "true"  # nor what a machine of Google's is told of its end
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

HOME = Path(tempfile.mkdtemp(prefix="odriver-"))
"""Tests, and processes that they start, write here and not to directories of this user. It is there before any test file is
imported, as some compile the CPU's kernels then. What was compiled once, by XLA or a C++ compiler, is not compiled again: the
workers of pytest-xdist share the cache of the process that starts them."""
KINDS = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache"}
if "PYTEST_XDIST_WORKER" in os.environ:
    del KINDS["XDG_CACHE_HOME"]
for variable, name in KINDS.items():
    (HOME / name).mkdir(mode=0o700)
    os.environ[variable] = str(HOME / name)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(os.environ["XDG_CACHE_HOME"]) / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import psutil  # noqa: E402
from browser import chromium, page_in  # noqa: E402
from daemons import News  # noqa: E402
from fake_driver import PATIENCE, FakeDriver, serving  # noqa: E402
from gateways import gateway  # noqa: E402
from grammar_constraints import running  # noqa: E402
from hypothesis import settings  # noqa: E402
from tokenizer_files import build_byte_level, write_tokenizer  # noqa: E402

from caching.cpu_kernels import KernelsUnavailable, load  # noqa: E402
from driver.grammars.compiler import GrammarCompiler  # noqa: E402
from driver.text.tokenizer import HuggingFaceTokenizer  # noqa: E402
from engine import cpu_libraries  # noqa: E402
from engine.devices.xla_threads import limit_xla_threads  # noqa: E402
from ipc.process.logs import OURS  # noqa: E402
from ipc.server import zmq_server  # noqa: E402
from ipc.service import daemon  # noqa: E402
from ipc.sockets.spawner import Spawner  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

gc.set_threshold(20_000, 20, 50)  # JAX keeps most of what it makes: to look as often as usual takes 4 % of the time
daemon.SHUTDOWN_TIMEOUT = PATIENCE  # after which it ends its process, which here is that of all tests


class SharedSpawner(Spawner):
    """Has one fork server for all servers of the tests: each of their own would import for a tenth of a second."""

    def stop(self) -> None:
        """A server has ended its processes before."""

    def sockets(self) -> list[psutil.Process]:
        """The processes of the servers that have not been stopped, and such as are just ending."""
        return psutil.Process(self._server.pid).children() if self._server is not None else []

    def end(self) -> None:
        """The last server has been stopped."""
        super().stop()


spawner = SharedSpawner()
zmq_server.Spawner = lambda: spawner  # type: ignore[assignment, misc]
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("few", max_examples=12, deadline=None)
settings.register_profile("many", max_examples=300, deadline=None)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ours."""
    parser.addoption("--compile-as-served", action="store_true", help="compile as the daemon does, not quickly")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is imported."""
    os.environ["XLA_FLAGS"] = "" if config.getoption("compile_as_served") else QUICK
    os.environ["XLA_FLAGS"] = xla_flags(devices=2)
    limit_xla_threads()  # before a test asks for a device that has built no engine
    if getattr(config.option, "numprocesses", None):  # or else each of the workers would compile the CPU's kernels
        with suppress(KernelsUnavailable):
            cpu_libraries.finish_loading()
            for source in cpu_libraries.LATER:
                load(source)


def pytest_unconfigure() -> None:
    """The run is over."""
    spawner.end()
    shutil.rmtree(HOME)


@pytest.fixture(scope="module", autouse=True)
def no_server_left_behind() -> Iterator[None]:
    """Every server that a file's tests have started has been stopped: it has no processes any more."""
    yield
    assert psutil.wait_procs(spawner.sockets(), PATIENCE)[1] == []


MOST_MAPPINGS = 10_000
"""Of a process's memory, which Linux limits to 65,530: each compiled function has some, and ends the process where none is left.
So many take three gigabytes, of which each of the processes that share out the files has its own."""


@pytest.fixture(scope="module", autouse=True)
def what_is_kept_is_no_garbage() -> None:
    """Of the millions of objects that JAX keeps of the files before, none is looked at in each full collection again.

    Where it keeps too many compiled functions, all are forgotten.
    """
    with Path("/proc/self/maps").open("rb") as mappings:
        if sum(1 for _ in mappings) > MOST_MAPPINGS:
            jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Other tests find the handlers and levels that there were."""
    root = logging.getLogger()
    handlers, level, levels = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in OURS}
    yield
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.fixture
def an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks whose systems are played wait for none of the other tests."""
    monkeypatch.setattr("scripts.benchmarks.serve.psutil.cpu_percent", lambda interval: 0.0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Where the server under test listens, or one after the other."""
    return f"ipc://{tmp_path}/o.sock"


@pytest.fixture
def driver(address: str) -> Iterator[FakeDriver]:
    """A driver that is being served."""
    driver = FakeDriver()
    with serving(address, driver):
        yield driver


@pytest.fixture
def news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[News]:
    """A listener in systemd's place."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    news = News(tmp_path / "notify")
    yield news
    news.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """As a model directory has it."""
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), build_byte_level()))


@pytest.fixture
def grammars(tokenizer: HuggingFaceTokenizer) -> Iterator[GrammarCompiler]:
    """Grammars that are ended with the test."""
    with running(tokenizer) as grammars:
        yield grammars


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A Chromium for the tests of one file: no event loop can run beside it."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: "Browser", driver: FakeDriver, address: str) -> "Iterator[Page]":
    """On a desk, in front of a gateway to the driver."""
    del driver
    with gateway(address) as client, page_in(browser, str(client.base_url)) as page:
        yield page
