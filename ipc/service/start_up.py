"""From an EngineConfig to a driver that can be started: what takes time in a start."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client.registry import Collector

from driver.request import ReturnSample
from engine.config import EngineConfig
from engine.cpu_libraries import start_loading
from engine.errors import ConfigurationError
from engine.exit_codes import FAULT, MISCONFIGURED, STOPPED
from engine.hub.roots import Root
from engine.hub.small_files import vocabulary_file
from engine.progress import Progress
from engine.request_limits import ServingLimits
from engine.speculation.speculative_config import SpeculativeConfig
from ipc.process.heap import freeze_heap, heap_frozen
from ipc.process.signals import postponing_signals
from ipc.server.driver_protocol import Driver
from ipc.service import device_choice
from ipc.service.facts_alike import facts_alike

if TYPE_CHECKING:
    from driver.open_requests import OpenRequest
    from driver.text.tokenizer import HuggingFaceTokenizer
    from engine.hosts.processes import Leader
    from engine.oengine import oEngine


class StartableDriver(Driver, Protocol):
    """The daemon's interface of a driver, beyond that of the sockets."""

    def observe(self, ended: "Callable[[OpenRequest, ReturnSample], None]") -> None:
        """Call this with each request that gets its last sample; before ``start``."""

    def start(self) -> None:
        """Begin to serve."""

    def drain(self, when_done: Callable[[], None]) -> None:
        """Take no new work; say when all that was open has ended."""

    def stages(self) -> dict[str, float]:
        """For how many seconds each stage has been busy with one thing; 0 when idle."""

    def stuck_requests(self, limit: float) -> list[str]:
        """The requests that have been in a stage's hands for more seconds than that."""

    def stop(self, reason: str, timeout: float) -> None:
        """End, and end every open request with the reason; gives up after ``timeout`` seconds."""

    def fail(self, reason: str, timeout: float) -> None:
        """The same after a fault, which an open request may have caused."""


@dataclass(frozen=True)
class Loaded:
    """A driver, and the model that it serves."""

    driver: StartableDriver
    model: str
    limits: ServingLimits
    facts: dict[str, str]
    """For people, by name."""
    metrics: Collector | None = None
    """Its Prometheus metrics."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    enable_lora: bool = False
    """Whether requests may name adapters."""
    fingerprint: str = ""
    """What it shares with daemons that answer as it does, but for rounding, by the weights of the start."""
    leave: Callable[[int, str], None] = lambda code, why: None  # noqa: ARG005
    """Has the processes of other hosts end with this exit code, and why."""


Load = Callable[
    [EngineConfig, Callable[[Progress], None], Callable[[int, str], None], Callable[[str, float], None]], Loaded
]
"""(config, report, end, ask_to_stop) -> the loaded driver.

``end`` is called, on any thread, with the exit code and why, if the driver fails or another host's process has ended;
``ask_to_stop`` is called, on any thread, if another host asks why and within how many seconds."""


def load(
    config: EngineConfig,
    report: Callable[[Progress], None],
    end: Callable[[int, str], None],
    ask_to_stop: Callable[[str, float], None],
) -> Loaded:
    """Load and compile. Raises ConfigurationError, DevicesUnavailable and HostsError."""
    if os.environ.get(device_choice.VARIABLE) == "cpu":
        start_loading()
    from engine.hub.obtain import obtained

    root = None if config.adapter_root is None else Root(config.adapter_root, "adapter_root")
    model = config.model or str(config.directory)
    config = obtained(config, report)
    # Seconds' worth of imports: not before it is known that there are an address and a model.
    with heap_frozen(), postponing_signals():
        import driver.metrics.driver_metrics
        import driver.odriver  # noqa: F401
        from driver.adapters.loader import check_first
        from engine.adapters.reader import check_files
        from engine.build import build_engine
        from engine.hosts.other_processes import ALONE, OtherProcesses

    check_first(config.lora_paths, root, config.served_model_name, check_files)
    background = ThreadPoolExecutor(1)
    tokenizer = background.submit(load_tokenizer, config)
    background.shutdown(wait=False)

    def report_unless_in_vain(progress: Progress) -> None:
        if tokenizer.done():
            tokenizer.result()  # raises what is wrong with it now, not when everything is compiled
        report(progress)

    leader = None
    if config.hosts is not None:
        from engine.hosts.processes import lead

        report(Progress("waiting for the other hosts", 0, config.hosts.num_processes - 1, "processes"))
        leader = lead(config.hosts, facts_alike(config), end, ask_to_stop)
    with nullcontext() if leader is None else _left_by(leader):
        others = ALONE if leader is None else OtherProcesses(leader.tell, leader.stage, leader.send_adapter)
        engine = build_engine(config, report_unless_in_vain, others, keep_executables=True)
        loaded = _driven(config, model, engine, tokenizer.result(), root, partial(end, FAULT))
    return loaded if leader is None else replace(loaded, leave=leader.leave)


@contextmanager
def _left_by(leader: "Leader") -> Iterator[None]:
    """While process 0 starts: if it does not, the others are told why, and end as it does."""
    try:
        yield
    except ConfigurationError as error:
        leader.leave(MISCONFIGURED, str(error))
        raise
    except Exception as error:
        leader.leave(FAULT, f"process 0 could not start: {error}")
        raise
    except BaseException:
        leader.leave(STOPPED, "process 0 was stopped while it started")
        raise


def _driven(
    config: EngineConfig,
    model: str,
    engine: "oEngine",
    tokenizer: "HuggingFaceTokenizer",
    root: Root | None,
    on_failure: Callable[[str], None],
) -> Loaded:
    """A driver of an engine, with the first adapters. Raises ConfigurationError for those."""
    from driver.metrics.driver_metrics import DriverMetrics
    from driver.odriver import oDriver

    tables, stats, drafts = engine.num_page_tables, engine.stats(), config.speculation
    facts = {
        **engine.description,
        "model": model,
        "pages": f"{stats.pages_total:,} of {engine.page_size} tokens"
        + (f" in one of {tables} groups of layers" if tables > 1 else ""),
        **(
            {"host cache": f"{stats.host_pages_total:,} pages of {stats.host_page_bytes:,} bytes"}
            if stats.host_pages_total
            else {}
        ),
        "context": f"{engine.limits.max_model_len:,} tokens",
        **({} if drafts is None else {"drafts": _drafts_in_words(drafts, config.max_num_seqs)}),
    }
    driver = oDriver(
        engine,
        tokenizer,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        model_names=config.served_model_name,
        max_cpu_loras=config.max_cpu_loras if config.enable_lora else 0,
        adapter_root=root,
        on_failure=on_failure,
    )
    driver.load_first(config.lora_paths)
    name, *aliases = config.served_model_name
    cache_config = {
        "block_size": str(engine.page_size),
        "num_gpu_blocks": str(stats.pages_total),
        "num_cpu_blocks": str(stats.host_pages_total),
        "cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": str(config.hbm_utilization or "auto"),
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    metrics = DriverMetrics(driver, name, cache_config)
    freeze_heap()
    fingerprint = _fingerprint(engine.fingerprint, tokenizer, driver.limits)
    return Loaded(driver, name, driver.limits, facts, metrics, tuple(aliases), config.enable_lora, fingerprint)


def _fingerprint(of_engine: str, tokenizer: "HuggingFaceTokenizer", limits: ServingLimits) -> str:
    """The engine's, with what else decides a prompt's tokens and where an output ends."""
    facts = of_engine, tokenizer.fingerprint, limits.eos_token_ids
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _drafts_in_words(drafts: SpeculativeConfig, max_num_seqs: int) -> str:
    words = f"{drafts.model or drafts.method}, at most {drafts.num_speculative_tokens} a row"
    if drafts.prompt_lookup_history is None:
        return words
    from engine.speculation.history import earlier_bytes

    count = drafts.prompt_lookup_history
    return f"{words}; of earlier requests {count:,} tokens, {earlier_bytes(max_num_seqs, count):,} bytes a device"


def load_tokenizer(config: EngineConfig) -> "HuggingFaceTokenizer":
    """The model's. Raises ConfigurationError if a draft model's has another vocabulary."""
    from driver.text.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(Path(config.tokenizer or config.directory), config.chat_template)
    draft = config.of_draft_model
    if draft is not None and draft.model != config.model and vocabulary_file(draft.directory) is not None:
        theirs = HuggingFaceTokenizer(draft.directory)
        if (different := tokenizer.different_token(theirs)) is not None:
            token_id, ours, other = different
            raise ConfigurationError(
                f"speculative_config: token {token_id} is {other!r} to the draft model {draft.model} and {ours!r} to the "
                "model: choose a draft model of the same vocabulary"
            )
    return tokenizer
