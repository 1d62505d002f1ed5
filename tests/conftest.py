"""JAX is made strict before any test imports it: no silent promotion of dtypes or ranks, and two CPU devices.

No configuration file of this machine holds either.
"""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xla_flags import xla_flags

# A shell starts its background jobs with SIGINT ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["ODRIVER_CONFIG"] = os.devnull  # not what this machine's own daemon is configured with
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(devices=2)
os.environ["TOKENIZERS_PARALLELISM"] = "false"

HOME = Path(tempfile.mkdtemp(prefix="odriver-"))
"""Tests, and processes that they start, write here and not to directories of this user. It is there before any test file is
imported, as some compile the CPU's kernels then. What was compiled once, by XLA or a C++ compiler, is not compiled again."""
for variable, name in {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache"}.items():
    (HOME / name).mkdir(mode=0o700)
    os.environ[variable] = str(HOME / name)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(HOME / "cache" / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import psutil  # noqa: E402
from browser import chromium, page_in  # noqa: E402
from fake_driver import FakeDriver, serving  # noqa: E402
from gateways import gateway  # noqa: E402
from grammar_constraints import running  # noqa: E402
from hypothesis import settings  # noqa: E402
from tokenizer_files import build_byte_level, write_tokenizer  # noqa: E402

from driver.grammars.compiler import GrammarCompiler  # noqa: E402
from driver.text.tokenizer import HuggingFaceTokenizer  # noqa: E402
from ipc.process.logs import OURS  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("few", max_examples=25, deadline=None)
settings.register_profile("many", max_examples=300, deadline=None)
settings.load_profile("few")


def pytest_unconfigure() -> None:
    """The run is over."""
    shutil.rmtree(HOME)


@pytest.fixture(scope="module", autouse=True)
def no_server_left_behind() -> Iterator[None]:
    """Every server that a file's tests have started has been stopped: its processes are children of this one."""
    yield
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it was just ending
            assert child.name() != "odriver-sockets"


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
def address(tmp_path: Path) -> str:
    """Where the server under test listens, or one after the other."""
    return f"ipc://{tmp_path}/o.sock"


@pytest.fixture
def driver(address: str) -> Iterator[FakeDriver]:
    """A driver that is being served."""
    driver = FakeDriver()
    with serving(address, driver):
        yield driver


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
