"""A systemd that is the first process of its own little machine: namespaces of this one, with /etc, /run and the like apart.

It runs oDriver from this checkout, out of /opt, where a service's own user can read it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SYSTEMD = Path("/usr/lib/systemd/systemd")
PATIENCE = 300
"""Seconds after which something is taken for never going to happen."""

_BOOT = """
set -e
mount --make-rprivate /
for place in /run /opt /var/cache /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $place; done
mkdir -p /run/systemd/system /opt/base /opt/packages /opt/source /opt/odriver /opt/etc
mount --bind {base} /opt/base
mount --bind {packages} /opt/packages
mount --bind {source} /opt/source
cp {command} /opt/odriver/odriver
cp -a /etc/. /opt/etc
mount --bind /opt/etc /etc
rm -rf /etc/systemd/system /etc/odriver /etc/fstab
mkdir -p /etc/systemd/system /etc/odriver
cp {unit} /etc/systemd/system/odriver.service
cp {config} /etc/odriver/config.toml
ip link set lo up
shopt -s nullglob
for unit in /usr/lib/systemd/system/{{sysinit,local-fs,timers,sockets}}.target.wants/*; do
    case $unit in */systemd-journald.s*) ;; *) ln -sfn /dev/null /etc/systemd/system/${{unit##*/}} ;; esac
done
for unit in systemd-journald-dev-log.socket systemd-journald-audit.socket dbus.socket; do
    ln -sfn /dev/null /etc/systemd/system/$unit
done
exec env -i container=other PATH=$PATH {systemd} --system --unit=basic.target
"""

_COMMAND = """\
#!/bin/sh
export LD_LIBRARY_PATH=/opt/base/lib PYTHONHOME=/opt/base PYTHONPATH=/opt/source:/opt/packages PYTHONDONTWRITEBYTECODE=1
exec /opt/base/bin/{python} -c 'import sys; from ipc.commands.cli import main; sys.exit(main())' "$@"
"""


def possible() -> bool:
    """Whether there can be such a machine here."""
    if os.geteuid() != 0 or not SYSTEMD.exists() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    tried = subprocess.run(["unshare", "-pmuinf", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/opt"], check=False)
    return tried.returncode == 0


class Machine:
    """Booted when it is entered, and gone when it is left."""

    def __init__(self, directory: Path, unit: str, config: str) -> None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        files = {"unit": unit, "config": config, "command": _COMMAND.format(python=version)}
        for name, text in files.items():
            (directory / name).write_text(text)
        (directory / "command").chmod(0o755)
        self._script = directory / "boot"
        self._script.write_text(
            _BOOT.format(
                base=sys.base_prefix, packages=sysconfig.get_path("purelib"), source=ROOT, systemd=SYSTEMD,
                **{name: directory / name for name in files},
            )
        )  # fmt: skip
        self._log = directory / "log"

    def __enter__(self) -> "Machine":
        with self._log.open("w") as log:
            self._outside = subprocess.Popen(
                ["unshare", "-pmuinf", "--kill-child", "--mount-proc", "bash", str(self._script)],
                stdout=log,
                stderr=log,
            )
        self._first = self._first_process()
        while self.run("systemctl", "is-system-running").stdout.strip() not in ("running", "degraded"):
            assert self._outside.poll() is None, self._log.read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._outside.kill()
        self._outside.wait()

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """A command inside."""
        inside = ["nsenter", "-t", str(self._first), "-a", *command]
        environment = {"PATH": os.environ["PATH"]}
        return subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def show(self, name: str) -> str:
        """A property of the service."""
        return self.run("systemctl", "show", "odriver", "-p", name, "--value").stdout.strip()

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        return int(found[0])
