"""The systemd unit that runs the daemon, for one environment."""

from collections.abc import Iterable
from pathlib import Path

CONFIG = Path("/etc/odriver/config.toml")
UNIT = Path("/etc/systemd/system/odriver.service")
USERS = Path("/etc/sysusers.d/odriver.conf")
USER = """\
# oDriver's user, who owns nothing else, and its group, whose members may use the service's socket.
u odriver - "oDriver" /var/lib/odriver
"""

_TEMPLATE = """\
# oDriver as a service, written by `odriver install-service`. Its settings are in {config}.

[Unit]
Description=oDriver, an LLM serving daemon
After=network.target
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} serve --config {config}
ExecReload=kill -HUP $MAINPID
KillMode=mixed
Restart=on-failure
RestartSec=2s
# An exit in order, such as after `odriver drain`, is for good: whoever may ask for that has the service end.
# 78 is a configuration that cannot work: starting again would not help.
RestartPreventExitStatus=78
# The start, of which the compiler takes most, extends this with each step that it makes.
TimeoutStartSec=10min
TimeoutStopSec=1min
# Told by steps that land, or by having nothing to do. SIGABRT then shows where every thread was.
WatchdogSec=60s
Environment=PYTHONFAULTHANDLER=1

# What the compilers make, XLA's and the one of the CPU kernels, stays in /var/cache/odriver.
# The user and group `odriver` are systemd-sysusers', or, if it has made none, there while the service runs.
DynamicUser=yes
User=odriver
CacheDirectory=odriver
CacheDirectoryMode=0700
StateDirectory=odriver
StateDirectoryMode=0700
RuntimeDirectory=odriver
# Members of the group may use the sockets in there; control is for this user and root.
RuntimeDirectoryMode=0750
ConfigurationDirectory=odriver
Environment=XDG_CACHE_HOME=%C/odriver XDG_STATE_HOME=%S/odriver XDG_RUNTIME_DIR=%t/odriver HOME=%S/odriver

MemoryMax=90%
MemorySwapMax=0
# Where memory is short the processes of grammars go first, and others take their place.
OOMPolicy=continue
TasksMax=4096
LimitNOFILE=65536
LimitCORE=0
# Accelerators want the memory that they read to stay where it is.
LimitMEMLOCK=infinity

# MemoryDenyWriteExecute is left out: compiled steps are code that is written and then run.
# ProcSubset is left out: /proc/cpuinfo and /proc/meminfo are read. PrivateDevices is left out: there are accelerators.
{sandbox}DevicePolicy=closed
DeviceAllow=char-accel rw
DeviceAllow=char-vfio rw
DeviceAllow=char-nvidia* rw
{kernel}
[Install]
WantedBy=multi-user.target
"""

_SANDBOX = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
"""
_KERNEL = """\
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
{addresses}\
LockPersonality=yes
RemoveIPC=yes
UMask=0077
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""
_LOOPBACK_ONLY = """\
# Nothing listens beyond this machine; link-local is where a TPU VM is told what it is.
IPAddressDeny=any
IPAddressAllow=localhost link-local
"""

_HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))


def render(command: Path, reads: list[Path], *, loopback_only: bool) -> str:
    """The unit for the ``odriver`` at this path and a daemon that reads these, with nothing but loopback where it can be.

    Home directories are out of its sight, unless something that it reads is in one.
    """
    return _TEMPLATE.format(
        command=quoted(command), config=quoted(CONFIG), **hardening((command, *reads), loopback_only=loopback_only)
    )


def hardening(reads: Iterable[Path], *, loopback_only: bool) -> dict[str, str]:
    """The lines that keep a service to itself, by their names in a template: what it sees of files, and of the rest."""
    at_home = any(path.is_relative_to(home) for path in reads for home in _HOMES)
    return {
        "sandbox": _SANDBOX.format(protect_home="read-only" if at_home else "yes"),
        "kernel": _KERNEL.format(addresses=_LOOPBACK_ONLY if loopback_only else ""),
    }


def quoted(path: Path) -> str:
    """As systemd reads a word of a command line; ``%`` begins a specifier there, ``$`` a variable."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(character in escaped for character in " '\"\\") else escaped
