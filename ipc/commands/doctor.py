"""``odriver doctor``: what would keep this machine from serving, and what to do about it.

A bad finding would make a start fail; a warning is about speed or a tight limit. No check changes
anything: devices are not opened, and what is bound or written for a moment is released.
"""

import importlib.metadata
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from rich.filesize import decimal

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.hardware.host_memory import available_bytes
from ipc.client import Client
from ipc.errors import OdriverError
from ipc.process import tables
from ipc.process.tables import plain, words_table
from ipc.service import accelerators
from ipc.service.configuration import DaemonConfig
from ipc.service.settings import configs, held
from ipc.wire import keys
from ipc.wire.addresses import anyone_listens, checked_address, is_local

MIN_FILES = 1024
"""Each client is a connection; the daemon needs some tens more."""
MIN_CACHE_BYTES = 2**30
GPU_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
PATIENCE = 5.0
"""Seconds for a daemon to say that it is one."""


class Finding(NamedTuple):
    """The result of one check: ``state`` is good, warning or bad; ``advice`` may be empty."""

    check: str
    state: str
    found: str
    advice: str = ""


def examine(flags: Mapping[str, Any]) -> list[Finding]:
    """Every check, for a daemon with these options of ``odriver serve``."""
    try:
        engine, daemon, _ = configs(held(flags))
    except ConfigurationError as error:
        return [Finding("settings", "bad", str(error), "put it right; `odriver config` shows what holds"), *_machine()]
    return [Finding("settings", "good", "can be read"), *_machine(), *_model(engine), *_addresses(daemon)]


def show(findings: Sequence[Finding]) -> None:
    """Print them as a table."""
    marks = {"good": "[green]✓", "warning": "[yellow]![/]", "bad": "[red]✗"}
    table = words_table("oDriver's doctor", "", "", "found", "what to do")
    for check, state, found, advice in findings:
        table.add_row(marks[state], check, plain(found), plain(advice))
    tables.show(table)


def _machine() -> Iterator[Finding]:
    yield versions(importlib.metadata.requires("odriver") or [])
    yield accelerator(accelerators.devices())
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
    from caching.cpu_kernels import cache_home

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


def _model(config: EngineConfig) -> Iterator[Finding]:
    from engine.hub.names import Place, place_of
    from engine.models.model_config import read_model_config
    from engine.models.weights.sources.opening import open_weights

    directory = config.directory
    try:
        if config.model is not None and place_of(config.model) is not Place.DIRECTORY:
            yield Finding("model", "good", f"{config.model}: the start asks the network for it")
            return
        read_model_config(directory)
        with open_weights(directory) as source:
            size = sum(source.info(name).nbytes for name in source.names)
    except ConfigurationError as error:
        yield Finding("model", "bad", str(error), "name another directory, or put this one right")
        return
    yield Finding("model", "good", f"{directory}, {decimal(size)} of weights")
    yield memory(size, available_bytes(), on_cpu=not accelerators.devices())


def memory(needed: int, available: int, *, on_cpu: bool) -> Finding:
    """Whether the weights fit; on an accelerator they only pass through, a tensor at a time."""
    found = f"{decimal(available)} available, weights of {decimal(needed)}"
    if on_cpu and needed > available:
        return Finding("memory", "bad", found, "end what else uses memory, or serve a smaller model")
    if on_cpu and needed > available / 2:
        return Finding("memory", "warning", found, "raise hbm_utilization; the cache will be small")
    return Finding("memory", "good", found)


def _addresses(config: DaemonConfig) -> Iterator[Finding]:
    try:
        address = checked_address(config.bind, has_key=True)
    except OdriverError as error:
        yield Finding("address", "bad", str(error), "set another `bind`")
    else:
        directory = config.keys or (None if is_local(address) else keys.default_directory())
        yield listener(address, asks_for_keys=directory is not None)
        if directory is not None:
            yield authorized(directory)
    if config.metrics_port:
        yield metrics_port(config.metrics_host, config.metrics_port)


def authorized(directory: Path) -> Finding:
    """Whether any key is authorised, where keys are required."""
    try:
        names = keys.authorized(directory)
    except OdriverError as error:
        return Finding("keys", "bad", str(error), "put it right, or revoke that key")
    if not names:
        return Finding("keys", "warning", f"none in {directory}", "odriver keys new NAME, for each client")
    return Finding("keys", "good", f"{len(names)} in {directory}")


def listener(address: str, *, asks_for_keys: bool = False) -> Finding:
    """Whether the address is free. Our own daemon there may be just what the user wants."""
    if not anyone_listens(address):
        return Finding("address", "good", f"{address} is free")
    if asks_for_keys:
        return Finding("address", "warning", f"{address} is taken", "nothing, if that is the daemon")
    try:
        with Client(address, timeout=PATIENCE) as client:
            serves = client.welcome.model
    except OdriverError:
        return Finding("address", "bad", f"{address} is taken by another program", "end it, or set another `bind`")
    return Finding(
        "address", "warning", f"a daemon serves {serves} at {address}", "nothing, unless you want a second one"
    )


def metrics_port(host: str, port: int) -> Finding:
    """Whether the port for metrics is free."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return Finding(
            "metrics port",
            "warning",
            f"{host}:{port}: {os.strerror(error.errno or 0)}",
            "a running daemon? else set another `metrics_port`",
        )
    return Finding("metrics port", "good", f"{host}:{port} is free")
