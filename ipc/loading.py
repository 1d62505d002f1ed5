"""From an EngineConfig to a driver that can be started: all that takes the daemon time to start."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.registry import Collector

from engine.config import EngineConfig, ServingLimits
from engine.progress import Progress
from ipc.driver import Driver

if TYPE_CHECKING:
    from driver.tokenizer import Tokenizer


class StartableDriver(Driver, Protocol):
    """What the daemon asks of a driver, besides what the sockets do."""

    def start(self) -> None:
        """Begin to serve."""

    def drain(self, when_done: Callable[[], None]) -> None:
        """Take no new work; say when all that was open has ended."""

    @property
    def seconds_since_progress(self) -> float:
        """For how long there has been work and nothing was done; 0 when idle."""

    def stop(self, reason: str, timeout: float) -> None:
        """End, and tell every open request why; gives up on what takes longer than the timeout, in seconds."""


@dataclass(frozen=True)
class Loaded:
    """A driver, and what it serves."""

    driver: StartableDriver
    model: str
    limits: ServingLimits
    facts: dict[str, str]
    """For people, by name."""
    metrics: Collector | None = None
    """What Prometheus is shown of it."""


Load = Callable[[EngineConfig, Callable[[Progress], None], Callable[[str], None]], Loaded]
"""(config, report, on_failure) -> what is to be served; ``on_failure`` is the driver's."""


def load(config: EngineConfig, report: Callable[[Progress], None], on_failure: Callable[[str], None]) -> Loaded:
    """Load the model and compile every step, and the tokenizer meanwhile. Raises ConfigurationError and
    DevicesUnavailable.
    """
    # Seconds' worth of imports: not before it is known that there is an address to serve at.
    from driver.metrics import DriverMetrics
    from driver.odriver import oDriver
    from engine.build import DEMO_MODEL, build_engine, describe

    directory = config.model or DEMO_MODEL
    background = ThreadPoolExecutor(1)
    tokenizer = background.submit(_load_tokenizer, directory)
    background.shutdown(wait=False)

    def report_unless_in_vain(progress: Progress) -> None:
        if tokenizer.done():
            tokenizer.result()  # raises what is wrong with it now, not when everything is compiled
        report(progress)

    engine = build_engine(config, report_unless_in_vain)
    facts = describe(config) | {
        "pages": f"{engine.stats().pages_total:,} of {engine.page_size} tokens",
        "context": f"{engine.limits.max_model_len:,} tokens",
    }
    driver = oDriver(
        engine,
        tokenizer.result(),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        on_failure=on_failure,
    )
    name = directory.resolve().name
    cache_config = {
        "block_size": str(engine.page_size),
        "num_gpu_blocks": str(engine.stats().pages_total),
        "cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": str(config.hbm_utilization or "auto"),
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    metrics = DriverMetrics(driver, name, cache_config)
    return Loaded(driver, name, engine.limits, facts, metrics)


def _load_tokenizer(directory: Path) -> "Tokenizer":
    from driver.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(directory)
