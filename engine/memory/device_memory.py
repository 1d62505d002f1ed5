"""How much of a device's memory is ours: what it reports, or what is known of its kind."""

import logging

import jax
from jax.errors import JaxRuntimeError

from caching.tpu.tpu_chip import CHIPS
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.memory.host_memory import available_bytes

logger = logging.getLogger(__name__)

ACCELERATOR_UTILIZATION = 0.9
CPU_UTILIZATION = 0.4
"""Other processes share a host's memory; an accelerator's is ours."""


def memory_budget(config: EngineConfig, devices: int) -> int:
    """Bytes we may use on each of this host's devices, weights included: the minimum over them.

    Raises ConfigurationError if the memory of an accelerator is not known.
    """
    return min(_left_on(device, devices, config.hbm_utilization) for device in jax.local_devices()[:devices])


def _rounded_down(num_bytes: int) -> int:
    """To one of eight sizes from each power of two to the next.

    The number of pages is a size of compiled steps: a later start, with about as much free memory,
    then finds those of an earlier one.
    """
    unit = 1 << max(0, num_bytes.bit_length() - 4)
    return num_bytes // unit * unit


def _left_on(device: jax.Device, devices: int, utilization: float | None) -> int:
    try:
        stats, silence = device.memory_stats(), "reports no memory_stats"
    except JaxRuntimeError as error:  # as some TPU runtimes do
        stats, silence = None, f"reports no memory_stats ({str(error).partition(chr(10))[0]})"
    share = utilization or ACCELERATOR_UTILIZATION
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * share) - int(stats.get("bytes_in_use", 0))
    if device.platform == "cpu":
        available = available_bytes()
        budget = int(available * (utilization or CPU_UTILIZATION))
        return (budget if utilization else _rounded_down(budget)) // devices
    if device.device_kind not in CHIPS:
        raise ConfigurationError(
            f"{device.device_kind} {silence}, and its memory is known of {', '.join(CHIPS)} alone: use a runtime that reports it"
        )
    memory = CHIPS[device.device_kind].hbm_bytes
    logger.warning(
        "%s %d %s: the pages are planned for the %s bytes that such a chip has, of which %.3g may be used. Set num_pages if "
        "other processes use it too",
        device.device_kind, device.id, silence, f"{memory:,}", share,
    )  # fmt: skip
    return int(memory * share)
