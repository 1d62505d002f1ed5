"""JAX is made strict before any test imports it: no silent promotion of dtypes or ranks, and two CPU devices.

No configuration file of this machine holds either.
"""

import logging
import os
import signal
from collections.abc import Iterator
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

import jax  # noqa: E402
from browser import chromium, page_in  # noqa: E402
from fake_driver import FakeDriver, serving  # noqa: E402
from gateways import gateway  # noqa: E402

from ipc.process.logs import OURS  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
