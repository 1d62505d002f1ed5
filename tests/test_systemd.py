"""The service under a real systemd, with all of its hardening: minutes, and for root on a machine that has systemd."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_machine import PATIENCE, Machine, possible

from ipc.commands.installation.systemd_units import USER, USERS, render_daemon
from ipc.wire.addresses import SERVICE

pytestmark = [pytest.mark.exhaustive]

CONFIG = (
    f'bind = "{SERVICE}"\nsocket_access = "group"\nmax_num_seqs = 4\nmax_num_batched_tokens = 16\nmax_model_len = 64\n'
)
WATCHDOG = 5


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the service installed, and a watchdog that loses its patience soon."""
    if not possible():
        pytest.skip("no systemd that could run in namespaces of ours")
    unit = render_daemon(Path("/opt/odriver/odriver"), [], loopback_only=True)
    with Machine(
        tmp_path_factory.mktemp("machine"), unit.replace("WatchdogSec=60s", f"WatchdogSec={WATCHDOG}s"), CONFIG
    ) as booted:
        yield booted


def complete(machine: Machine, *flags: str) -> str:
    """What the model makes of an opening, asked for by a client inside."""
    asked = ["complete", "Once upon a time", "--max-tokens", "12", "--temperature", "0", *flags]
    done = machine.run("/opt/odriver/odriver", *asked)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_service_lives_as_its_unit_says(machine: Machine) -> None:
    """It compiles and serves as a user without rights, reloads, is restarted when it hangs, and stops."""
    started = machine.run("systemctl", "start", "odriver")
    assert started.returncode == 0, machine.run("journalctl", "-u", "odriver").stdout
    assert machine.show("StatusText") == "serving"
    status = machine.run("cat", f"/proc/{machine.show('MainPID')}/status").stdout
    assert machine.show("UID") != "0" and "CapEff:\t0000000000000000" in status and "Seccomp:\t2" in status
    assert machine.run("ls", "/var/cache/odriver/odriver").stdout.split() == ["kernels", "xla"]

    text = complete(machine)
    assert len(text.split()) > 4
    assert complete(machine, "--choice", " crown").strip() == "crown"
    assert machine.run("systemctl", "reload", "odriver").returncode == 0

    machine.run("kill", "-STOP", machine.show("MainPID"))
    deadline = time.monotonic() + PATIENCE
    while machine.show("NRestarts") != "1" or machine.show("ActiveState") != "active":
        assert time.monotonic() < deadline, machine.show("ActiveState")
        time.sleep(0.5)
    assert complete(machine) == text

    assert machine.run("systemctl", "stop", "odriver").returncode == 0
    assert (machine.show("ActiveState"), machine.show("Result")) == ("inactive", "success")


def test_the_socket_is_for_the_group_and_control_for_root(machine: Machine) -> None:
    """A member asks and may not steer, anybody else does not get in; what root drains ends in order, and for good."""
    machine.run("mkdir", "-p", str(USERS.parent))
    assert machine.run("sh", "-c", f"echo '{USER}' > {USERS} && systemd-sysusers {USERS.name}").returncode == 0
    for name, groups in (("member", "odriver"), ("stranger", "")):
        assert machine.run("useradd", "--groups", groups, name).returncode == 0
    assert machine.run("systemctl", "start", "odriver").returncode == 0, machine.run(
        "journalctl", "-u", "odriver"
    ).stdout
    assert machine.run("id", "-u", "odriver").stdout.strip() == machine.show("UID")

    def as_user(name: str, *command: str) -> "subprocess.CompletedProcess[str]":
        return machine.run(
            "setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "/opt/odriver/odriver", *command
        )

    assert as_user("member", "complete", "Once", "--max-tokens", "2").returncode == 0
    assert "serving" in as_user("member", "status").stdout
    assert "may not control the daemon" in as_user("member", "drain").stderr
    assert "usermod -aG odriver" in as_user("stranger", "status").stderr
    assert machine.run("/opt/odriver/odriver", "drain", "--timeout", "inf").returncode == 0

    deadline = time.monotonic() + PATIENCE
    while machine.show("ActiveState") != "inactive":
        assert time.monotonic() < deadline, machine.show("ActiveState")
        time.sleep(0.5)
    assert (machine.show("Result"), machine.show("NRestarts")) == ("success", "0")


def test_a_configuration_that_cannot_work_is_not_tried_again(machine: Machine) -> None:
    """The service has failed, with the exit code that says so."""
    machine.run("sh", "-c", "echo 'page_size = 0' > /etc/odriver/config.toml")

    assert machine.run("systemctl", "start", "odriver").returncode != 0

    assert (machine.show("ActiveState"), machine.show("ExecMainStatus")) == ("failed", "78")
