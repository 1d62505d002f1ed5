"""The systemd unit that runs a gateway beside the daemon's service, for one environment."""

from pathlib import Path

from ipc.service.service_unit import CONFIG, hardening, quoted

NAME = "odriver-gateway.service"

_TEMPLATE = """\
# OpenAI's HTTP API in front of oDriver's service, written by `odriver install-service`. It finds the daemon by {config}
# and serves this machine alone, at port 8000. Flags, such as --api-keys, are for `systemctl edit odriver-gateway`.

[Unit]
Description=oDriver's gateway, OpenAI's HTTP API
# It waits for the daemon itself, and outlives it.
After=network.target odriver.service
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} gateway
ExecReload=kill -HUP $MAINPID
KillMode=mixed
Restart=on-failure
RestartSec=2s
# 78 is a configuration that cannot work: starting again would not help.
RestartPreventExitStatus=78
# What is open has 30 seconds to finish.
TimeoutStopSec=1min
Environment=PYTHONFAULTHANDLER=1

# The daemon's own user: /health and /metrics are asked at its control socket.
DynamicUser=yes
User=odriver
ConfigurationDirectory=odriver
Environment=ODRIVER_CONFIG={config} XDG_RUNTIME_DIR=%t/odriver HOME=/nonexistent

# Bodies and answers that it holds have a bound of 256 MiB, and connections of 4096.
MemoryMax=2G
MemorySwapMax=0
TasksMax=1024
LimitNOFILE=65536
LimitCORE=0

{sandbox}\
PrivateDevices=yes
{kernel}\

[Install]
WantedBy=multi-user.target
"""


def render(command: Path, reads: list[Path]) -> str:
    """The unit for the ``odriver`` at this path, whose environment is in these directories."""
    return _TEMPLATE.format(
        command=quoted(command), config=quoted(CONFIG), **hardening((command, *reads), loopback_only=True)
    )
