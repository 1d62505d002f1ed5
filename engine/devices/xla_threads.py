"""How many threads XLA has on a CPU. It reads NPROC for that, once, when JAX initializes its devices."""

import os
import re

import jax

from caching.cores import usable_cores

DISPATCHERS = 2
"""Threads of ours that dispatch functions at the same time: the one that runs steps, and one that stages weights."""
_VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def limit_xla_threads() -> None:
    """Give XLA:CPU one thread fewer than there are cores, because its threads spin and delay ours.

    With one thread per core a step of one row takes up to 1.8 times as long. XLA has no other
    setting for this.

    Where the process has several virtual devices, XLA gets as many as it can need, however few
    cores there are: it dispatches a function by a task for each device, which blocks a thread of
    the pool while the device has 32 functions to do, and these wait for threads of the same pool,
    one for each device at once, as each blocks its own until the others have come to a sum. With
    fewer threads both may wait for each other for ever.
    """
    given = os.environ.get("NPROC", "")
    threads = int(given) if given.isdecimal() else usable_cores() - 1
    devices = _num_virtual_devices()
    least = (DISPATCHERS + 1) * devices if devices > 1 else 1
    os.environ["NPROC"] = str(max(threads, least))


def _num_virtual_devices() -> int:
    """The CPU devices that JAX makes, or has made, in this process."""
    asked: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    flags = _VIRTUAL_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    return asked if asked > 0 else int(flags[-1]) if flags else 1
