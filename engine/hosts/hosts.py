"""Which processes an engine has, one per host."""

from dataclasses import dataclass

from engine.errors import ConfigurationError
from engine.setting_fields import require_setting


@dataclass(frozen=True)
class Hosts:
    """The processes of one engine, one per host, and the id of this process."""

    coordinator_address: str
    """HOST:PORT of process 0, for jax.distributed."""
    num_processes: int
    process_id: int


def check_hosts(address: str | None, num_processes: int, process_id: int) -> None:
    """Raises ConfigurationError where an operator's settings name no processes, or not this one."""
    require_setting(num_processes >= 1, "num_processes", "at least 1", num_processes)
    numbered = 0 <= process_id < num_processes
    require_setting(numbered, "process_id", f"0 to {num_processes - 1}, below num_processes", process_id)
    if (num_processes > 1) == (address is None):
        raise ConfigurationError(
            "coordinator_address and num_processes go together: with several hosts give both on each, and with one neither"
        )
    host, _, port = (address or "localhost:1").rpartition(":")
    named = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    named = named and ":" not in host  # what is beside jax's own connection is IPv4
    require_setting(named, "coordinator_address", "process 0's HOST:PORT, a name or an IPv4 address", address)
