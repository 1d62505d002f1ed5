"""Absent TPUs, for which libtpu compiles on any machine, by the names that Google Cloud has."""

import difflib
import importlib.util
import math
import os
import re

from jax import Device
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from engine.errors import ConfigurationError

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBIC = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x12", "8x8x16", "8x12x16", "8x16x16",
    "12x16x16", "16x16x16", "16x16x24",
)  # fmt: skip
"""Shapes of the slices that can be had (cloud.google.com/tpu/docs), by number of chips."""
MOST_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256}
"""Of the largest slice. libtpu takes more, up to where it crashes."""
V5E_MACHINES, V6E_MACHINE = ("ct5lp-hightpu", "ct5l-hightpu"), "ct6e-standard"
HOST_BOUNDS = (2, 2, 1)
"""Chips of a host by axis, as libtpu assumes; smaller topologies need smaller bounds."""
CHIP_CONFIGS = {"v4": "megacore"}
"""Where libtpu's default is not what JAX runs with: a v4 chip is one device, with two cores."""


def _chips(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _known_names() -> dict[str, str]:
    """Topologies by accelerator type (a v4's and v5p's count cores, two a chip) and by machine
    type, whose suffix counts chips."""
    names: dict[str, str] = {}
    for shape in FLAT:
        chips = math.prod(_chips(shape))
        names |= {f"{kind}-{chips}": f"v5e:{shape}" for kind in ("v5litepod", "v5e")}
        names[f"v6e-{chips}"] = f"v6e:{shape}"
    for shape in CUBIC:
        chips = math.prod(_chips(shape))
        names |= {f"{kind}-{2 * chips}": f"{kind}:{shape}" for kind in ("v4", "v5p") if chips <= MOST_CHIPS[kind]}
    for shape in ("1x1", "2x2", "2x4"):
        chips = math.prod(_chips(shape))
        names |= {f"{machine}-{chips}t": f"v5e:{shape}" for machine in V5E_MACHINES}
        names[f"{V6E_MACHINE}-{chips}t"] = f"v6e:{shape}"
    for shape in ("1x1x1", "1x2x1", "2x2x1"):
        names[f"ct5p-hightpu-{math.prod(_chips(shape))}t"] = f"v5p:{shape}"
    return names | {"ct4p-hightpu-4t": "v4:2x2x1"}


NAMES = _known_names()
_IRONWOOD = re.compile(r"(tpu[ _-]?v?|ct|v)7x?([:=_-].*)?|ironwood.*")
_TOPOLOGY = re.compile(r"(?P<kind>v4|v5e|v5litepod|v5p|v6e)[:=_-](?P<shape>\d+x\d+(x\d+)?)")


def topology_of(name: str) -> str:
    """``v5e:2x4`` of that topology's name, of ``v5litepod-8`` or of ``ct5lp-hightpu-8t``.

    Raises ConfigurationError, with the names most like it, for any other, for a TPU7x, and for a shape
    that no slice is as large as.
    """
    asked = name.strip().lower()
    if asked in NAMES:
        return NAMES[asked]
    if found := _TOPOLOGY.fullmatch(asked):
        return _checked(found["kind"].replace("v5litepod", "v5e"), found["shape"])
    if _IRONWOOD.fullmatch(asked):
        raise ConfigurationError(
            f"{name!r} is a TPU7x (Ironwood), which is not planned for: its chip is two devices, each with half of its memory "
            f"and a faster link to the other, and it has no known rate of int8; known are {', '.join(MOST_CHIPS)}"
        )
    similar = ", ".join(difflib.get_close_matches(asked, NAMES, 4))
    raise ConfigurationError(
        f"no TPU is called {name!r}{f' (did you mean one of {similar}?)' if similar else ''}: give an accelerator type such as "
        "v6e-1, v5litepod-8 or v5p-8, a machine type such as ct6e-standard-8t, or a topology such as v5e:2x4"
    )


def _checked(kind: str, shape: str) -> str:
    chips, most = math.prod(_chips(shape)), MOST_CHIPS[kind]
    if not 1 <= chips <= most:
        raise ConfigurationError(f"{kind}:{shape} would be {chips:,} chips: a slice of {kind} has 1 to {most:,}")
    return f"{kind}:{shape}"


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
    kind, _, shape = topology.partition(":")
    bounds = tuple(map(min, (*_chips(shape), 1)[: len(HOST_BOUNDS)], HOST_BOUNDS))
    options = {"chip_config_name": CHIP_CONFIGS[kind]} if kind in CHIP_CONFIGS else {}
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, chips_per_host_bounds=bounds, **options
        )
    except JaxRuntimeError as error:
        raise ConfigurationError(f"libtpu cannot compile for {topology!r}; names are like v5e:2x4 ({error})") from error
    return list(found.devices)
