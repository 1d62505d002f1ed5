"""JAX is made strict before any test imports it: no silent promotion of dtypes or ranks, and two CPU devices.

No configuration file of this machine holds either.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# A shell starts its background jobs with SIGINT ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["ODRIVER_CONFIG"] = os.devnull  # not what this machine's own daemon is configured with
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402

from ipc.logs import OURS  # noqa: E402

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
