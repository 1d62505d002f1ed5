"""The kind of device that a daemon serves on, chosen before JAX is imported.

JAX then loads the support of that kind alone: without a TPU, libtpu does not get to complain.
"""

import importlib.util
import logging
import os
from importlib.metadata import entry_points
from pathlib import Path

from engine.errors import ConfigurationError
from ipc.service import accelerators

logger = logging.getLogger(__name__)

DEVICES = ("auto", "tpu", "gpu", "cpu")
VARIABLE = "JAX_PLATFORMS"
"""JAX reads it when it is imported: it fails if it cannot have one of these, and uses the first."""
INSTALL_TPU = 'pip install "odriver[tpu]"'
INSTALL_GPU = 'pip install "jax[cuda]"'


def choose_device(device: str, root: Path = Path("/")) -> None:
    """Set VARIABLE for one of DEVICES. "auto" leaves it alone if the user has set it.

    Raises ConfigurationError if JAX lacks the support of the device, be it named or a TPU that was
    found: nobody wants a TPU VM to serve on its CPU. For a GPU that was found it logs a warning.
    """
    value = platforms(device, root)
    if device == "auto" and value == "cpu" and (gpus := accelerators.gpus(root)):
        logger.warning(
            "the CPU serves: JAX has no plugin for the GPU (%s). What to do: %s",
            ", ".join(map(str, gpus)), INSTALL_GPU,
        )  # fmt: skip
    if value is not None:
        os.environ[VARIABLE] = value


def platforms(device: str, root: Path) -> str | None:
    """What VARIABLE is to be for one of DEVICES; None where it is left alone.

    Raises ConfigurationError as ``choose_device`` does.
    """
    if device == "auto":
        if os.environ.get(VARIABLE):
            return None
        device = _found(root)
    if device == "tpu" and not sees_tpus():
        there = ", ".join(map(str, accelerators.tpus(root)))
        raise ConfigurationError(
            f"JAX cannot use the TPU{there and f' ({there})'}, because libtpu is not installed: {INSTALL_TPU}, "
            "or serve on the CPU with --device cpu"
        )
    if device == "gpu" and not sees_gpus():
        raise ConfigurationError(f"JAX cannot use a GPU, because no plugin for one is installed: {INSTALL_GPU}")
    return {"tpu": "tpu,cpu", "gpu": f"{_gpu_platform()},cpu", "cpu": "cpu"}.get(device)


def asks_for_cpu(device: str) -> bool:
    """Whether it is the user who wants the CPU, whatever else there is."""
    return device == "cpu" or (device == "auto" and os.environ.get(VARIABLE, "").partition(",")[0] == "cpu")


def is_cpu(device: str, root: Path = Path("/")) -> bool:
    """Whether the CPU is what serves for one of DEVICES."""
    return asks_for_cpu(device) or (device == "auto" and not os.environ.get(VARIABLE) and _found(root) == "cpu")


def sees_tpus() -> bool:
    """Whether libtpu is installed, through which JAX uses TPUs."""
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def sees_gpus() -> bool:
    """Whether JAX has a plugin, as there are for GPUs."""
    return bool(entry_points(group="jax_plugins"))


def _found(root: Path) -> str:
    """One of DEVICES; "auto" if JAX is to choose among the plugins that are installed."""
    if accelerators.tpus(root):
        return "tpu"
    if sees_gpus():
        return "auto"
    return "cpu"


def _gpu_platform() -> str:
    """JAX's name of it."""
    return "rocm" if any("rocm" in plugin.name for plugin in entry_points(group="jax_plugins")) else "cuda"
