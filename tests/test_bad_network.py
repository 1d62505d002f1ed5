"""Daemon and client over TCP between two network namespaces, with a network that is slow, loses packets and is cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import PATIENCE

ROOT = Path(__file__).parent.parent


def permitted() -> bool:
    """Whether namespaces may be made here, and devices in them."""
    probe = "import os; os.close(os.open('/dev/net/tun', os.O_RDWR))"
    try:
        made = subprocess.run(["unshare", "--map-root-user", "--net", sys.executable, "-c", probe], capture_output=True)
        return made.returncode == 0 and subprocess.run(["ip", "-V"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.thorough
def test_streams_are_whole_over_a_network_that_loses_and_is_cut() -> None:
    """Each token comes once; both sides notice the cut, and what was open is aborted, or resumed when it is mended."""
    if not permitted():
        pytest.skip("needs unshare, ip and /dev/net/tun, and leave to make namespaces")

    done = subprocess.run(
        [sys.executable, "-m", "scripts.bad_network", "--silence", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    assert done.returncode == 0, done.stderr
    whole, cut, aborted, mended = done.stdout.splitlines()
    assert whole == "20 streams of 200 tokens: whole"
    assert "has not answered for 2 s" in cut
    assert aborted.startswith("the daemon has aborted its work")
    assert mended.startswith("mended")
