"""Absent TPUs, for which libtpu compiles on any machine."""

import importlib.util
import os

from jax import Device
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from engine.errors import ConfigurationError


def chips_of(topology: str) -> list[Device]:
    """The devices of a topology such as ``v5e:2x4``, to compile for but not to run on.

    Raises ConfigurationError if libtpu is missing or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigurationError(f'libtpu, which compiles for {topology}, is not installed: pip install "odriver[tpu]"')
    # Without these, libtpu asks the network what machine it is on.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # any value works with a topology
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except JaxRuntimeError as error:
        raise ConfigurationError(f"libtpu cannot compile for {topology!r}; names are like v5e:2x4 ({error})") from error
    return list(found.devices)
