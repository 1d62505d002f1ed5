"""``odriver doctor``: what would keep this machine from serving, and what to do about it.

A bad finding would make a start fail; a warning is about speed or a tight limit. No check changes
anything: devices are not opened, and what is bound or written for a moment is released.
"""

import importlib.metadata
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.filesize import decimal

from engine.errors import ConfigurationError
from ipc.commands.diagnosis import address_checks, model_checks
from ipc.commands.diagnosis.findings import Finding
from ipc.service import accelerators, device_choice
from ipc.service.settings import configs, held

MIN_FILES = 1024
"""Each client is a connection; the daemon needs some tens more."""
MIN_CACHE_BYTES = 2**30
GPU_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def examine(flags: Mapping[str, Any]) -> list[Finding]:
    """Every check, for a daemon with these options of ``odriver serve``."""
    try:
        engine, daemon, http = configs(held(flags))
    except ConfigurationError as error:
        wrong = Finding("settings", "bad", str(error), "put it right; `odriver config` shows what holds")
        return [wrong, *_machine("auto")]
    return [
        Finding("settings", "good", "can be read"),
        *_machine(daemon.device),
        *model_checks.examine(engine, on_cpu=device_choice.is_cpu(daemon.device)),
        *address_checks.examine(daemon, http),
    ]


def _machine(device: str) -> Iterator[Finding]:
    yield versions(importlib.metadata.requires("odriver") or [])
    yield chosen(device) or accelerator(accelerators.devices())
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield kernels()
    yield cache()


def versions(requirements: list[str]) -> Finding:
    """Whether our requirements are installed in supported versions."""
    wrong = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return Finding("versions", "bad", "; ".join(wrong), "install oDriver into this environment again")
    return Finding("versions", "good", f"of {len(requirements)} requirements, all that apply are met")


def chosen(device: str, root: Path = Path("/")) -> Finding | None:
    """What ``device`` leaves to be said about accelerators, if it names one; None if they are to be
    looked at."""
    if device_choice.asks_for_cpu(device):
        return Finding("accelerator", "good", "not asked for: the CPU will serve")
    if device == "auto":
        return None
    try:
        device_choice.platforms(device, root)
    except ConfigurationError as error:
        return Finding("accelerator", "bad", str(error), "or set another `device`")
    if device == "tpu" and not accelerators.tpus(root):
        return Finding("accelerator", "bad", "there is no TPU", "set another `device`")
    return None


def accelerator(devices: list[Path], lock: Path = accelerators.TPU_LOCK) -> Finding:
    """Whether a TPU or GPU is there, accessible, free, and supported by the installed JAX."""
    if not devices:
        return Finding("accelerator", "good", "none: the CPU will serve")
    names = ", ".join(map(str, devices))
    closed = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if closed:
        return Finding("accelerator", "bad", f"{', '.join(closed)} may not be opened", "join its group, or ask root")
    is_gpu = all(device.name.startswith("nvidia") for device in devices)
    if is_gpu and (sharing := accelerators.holders(devices)):
        who, end_it = "; with ".join(map(str, sharing)), accelerators.end_of(sharing)
        return Finding("accelerator", "warning", f"{names} is shared with {who}", f"if it takes memory: {end_it}")
    if not is_gpu and (obstacle := accelerators.tpu_obstacle(devices, lock)):
        return Finding("accelerator", "bad", obstacle.found, obstacle.advice)
    if not any(map(_is_installed, GPU_PLUGINS if is_gpu else ("libtpu",))):
        lacks, install = ("JAX has no plugin for it", "jax[cuda]") if is_gpu else ("no libtpu", "odriver[tpu]")
        return Finding(
            "accelerator", "warning" if is_gpu else "bad", f"{names}, but {lacks}", f'pip install "{install}"'
        )
    return Finding("accelerator", "good", f"{names}, free")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def open_files(soft: int, hard: int) -> Finding:
    """Whether the hard limit of open files allows enough clients; a start raises the soft one."""
    most = "any number" if hard == resource.RLIM_INFINITY else f"{hard} at most"
    found = most if soft == hard else f"{most}: a start raises the limit of this shell, which is {soft}"
    if hard != resource.RLIM_INFINITY and hard < MIN_FILES:
        return Finding("open files", "warning", found, f"ulimit -Hn {MIN_FILES}, or more")
    return Finding("open files", "good", found)


def kernels() -> Finding:
    """Which libraries of CPU kernels a start loads; accelerators don't need them."""
    from caching import cpu_kernels, instruction_set
    from engine.cpu_libraries import SOURCES

    try:
        level = instruction_set.level()
        libraries = [cpu_kernels.find(source) for source in SOURCES]
        if None in libraries:
            compiler = cpu_kernels.compiler()
            return Finding("kernels", "good", f"for {level}: the first start compiles them, by {compiler}")
    except instruction_set.UnknownInstructions as error:
        return Finding("kernels", "bad", str(error), f"put {instruction_set.VARIABLE} right")
    except cpu_kernels.KernelsUnavailable as error:
        return Finding(
            "kernels", "warning", f"none for {level}, and {error}", "on a CPU: install g++, or a wheel with them"
        )
    came = [library.parent == cpu_kernels.SHIPPED for library in libraries if library is not None]
    how = "shipped" if all(came) else "compiled on this machine"
    return Finding("kernels", "good", f"for {level}, {how}")


def cache() -> Finding:
    """Whether the compilation cache is writable and has room."""
    from caching.cache_directory import cache_home

    home = cache_home()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home):
            free = shutil.disk_usage(home).free
    except OSError as error:
        return Finding(
            "cache", "bad", f"cannot write in {home}: {error.strerror}", "set XDG_CACHE_HOME to a place that can"
        )
    if free < MIN_CACHE_BYTES:
        return Finding(
            "cache", "warning", f"{home} has {decimal(free)} left", "make room, or every start compiles anew"
        )
    return Finding("cache", "good", str(home))
