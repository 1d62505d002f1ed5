"""The report on this machine's devices: what they are, and every measurement."""

import os
import platform
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax
import msgspec
import psutil

from caching.tpu.tpu_chip import CHIPS, Chip
from engine.config import EngineConfig
from engine.devices.device_errors import acquire_devices
from engine.hardware.expert_products import measure_experts
from engine.hardware.kernels import measure_kernels
from engine.hardware.measurement import Measurement, Scale, attempted, scale_here
from engine.hardware.steps import measure_steps
from engine.hardware.transfers import measure_collectives, measure_host, measure_memory
from engine.progress import Progress

PACKAGES = ("odriver", "jax", "jaxlib", "libtpu", "flax", "numpy")
VARIABLES = ("TPU_", "LIBTPU_", "XLA_", "JAX_")
"""Prefixes of the environment's variables that change what is measured."""


class HardwareReport(msgspec.Struct, frozen=True):
    """Facts by name, and the measurements in order."""

    facts: dict[str, str]
    measurements: list[Measurement]

    @property
    def is_good(self) -> bool:
        """Whether nothing is bad; what could not be measured is not."""
        return all(one.state != "bad" for one in self.measurements)


def examine_hardware(config: EngineConfig, report: Callable[[Progress], None]) -> HardwareReport:
    """Measure everything, with the model and settings of ``config``; takes the devices.

    Raises DevicesUnavailable.
    """
    acquire_devices()
    kind = jax.local_devices()[0].device_kind
    chip, scale = CHIPS.get(kind), scale_here()
    measurements: list[Measurement] = []

    def measure(number: int, section: str, measure: Callable[[], Iterable[Measurement]]) -> None:
        report(Progress("measuring", number, 6, "parts"))
        measurements.extend(attempted(section, measure))

    measure(0, "memory", partial(measure_memory, scale, chip))
    rates = chip or _measured_chip(measurements)
    measure(1, "kernels", partial(measure_kernels, scale, rates.hbm_bandwidth))
    measure(2, "experts", partial(measure_experts, rates.hbm_bandwidth))
    measure(3, "host", partial(measure_host, scale))
    measure(4, "collectives", partial(measure_collectives, scale, chip))
    measure(5, "steps", partial(measure_steps, config, scale, rates, kind, report))
    return HardwareReport(_facts(scale), measurements)


def _measured_chip(measurements: list[Measurement]) -> Chip:
    """A device that the table does not have, by what was measured of it; NaN where nothing was.

    Numbers of int8 are taken to be multiplied at the rate of others.
    """
    found = {one.section: one.value for one in measurements if one.value is not None}
    bandwidth, flops = found.get("memory", float("nan")), found.get("arithmetic", float("nan"))
    return Chip(
        hbm_bytes=0,
        hbm_bandwidth=1e9 * bandwidth,
        bf16_flops=1e12 * flops,
        int8_ops=1e12 * flops,
        link_bandwidth=float("nan"),
        host_bandwidth=float("nan"),
    )


def _facts(scale: Scale) -> dict[str, str]:
    devices = jax.devices()
    try:
        memory = str(devices[0].memory_stats())
    except jax.errors.JaxRuntimeError as error:
        memory = f"fails: {error}"
    coordinates = [str(getattr(device, "coords", "")) for device in devices]
    return {
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "coordinates": " ".join(filter(None, coordinates)) or "none",
        "memory_stats": memory,
        "host": f"{os.cpu_count()} cores, {psutil.virtual_memory().total:,} bytes, {platform.platform()}",
        "python": platform.python_version(),
        "environment": " ".join(
            f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        ),
        "arrays": f"of up to {scale.large_bytes:,} bytes",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
