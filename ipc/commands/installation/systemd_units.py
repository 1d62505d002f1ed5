"""The systemd units of daemon and gateway; their templates are in ``units/``."""

import re
from pathlib import Path

CONFIG = Path("/etc/odriver/config.toml")
UNIT = Path("/etc/systemd/system/odriver.service")
GATEWAY = "odriver-gateway.service"
_TEMPLATES = Path(__file__).parent / "units"
USERS = Path("/etc/sysusers.d/odriver.conf")
USER_NAME = "odriver"
STATE = Path("/var/lib/odriver")
"""The directory that systemd makes for the service's user, to which it alone may get (DynamicUser)."""
USER = f"""\
# oDriver's user, who owns nothing else, and its group, whose members may use the service's socket.
u {USER_NAME} - "oDriver" {STATE}
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

_ONLINE = """\
Wants=network-online.target
After=network-online.target
"""
_TOKEN = """\
# The model comes from the network. A token for it, if any, is root's /etc/credstore/odriver.hf-token.
LoadCredential=odriver.hf-token
"""

_REFUSED = re.compile(r"""[\x00-\x1f\x7f'"\\\ud800-\udfff]""")
_HOMES = tuple(map(Path, ("/home", "/root", "/run/user")))


def render_daemon(command: Path, reads: list[Path], *, loopback_only: bool, is_remote: bool = False) -> str:
    """The daemon's unit, for the ``odriver`` at this path and a daemon that reads these files.

    Where it can be, the daemon may use no network but loopback: not where other machines reach it,
    or where its model ``is_remote``. It sees home directories only if it reads something there.
    """
    if is_remote:
        return _render(UNIT.name, command, reads, loopback_only=False, network=_ONLINE, token=_TOKEN)
    return _render(UNIT.name, command, reads, loopback_only=loopback_only)


def render_gateway(command: Path, reads: list[Path]) -> str:
    """The gateway's unit, for the ``odriver`` at this path and its environment."""
    return _render(GATEWAY, command, reads, loopback_only=True)


def _render(
    name: str,
    command: Path,
    reads: list[Path],
    *,
    loopback_only: bool,
    network: str = "After=network.target\n",
    token: str = "",
) -> str:
    at_home = any(path.is_relative_to(home) for path in (command, *reads) for home in _HOMES)
    return (
        (_TEMPLATES / name)
        .read_text(encoding="utf-8")
        .format(
            command=_quoted(command),
            config=_quoted(CONFIG),
            network=network,
            token=token,
            sandbox=_SANDBOX.format(protect_home="read-only" if at_home else "yes"),
            kernel=_KERNEL.format(addresses=_LOOPBACK_ONLY if loopback_only else ""),
        )
    )


def refused(command: Path) -> bool:
    """Whether systemd runs no program at this path, however it is written."""
    return _REFUSED.search(str(command)) is not None


def _quoted(path: Path) -> str:
    """Quoted for systemd's command lines, where ``%`` is special. ``$`` is not, in a program's path."""
    escaped = str(path).replace("%", "%%")
    return f'"{escaped}"' if " " in escaped else escaped
