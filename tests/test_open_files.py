"""The limit of open files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.exit_codes import MISCONFIGURED

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("soft", [64, 512])
def test_the_soft_limit_becomes_the_hard_one(soft: int) -> None:
    """Whatever the shell had; a second time changes nothing."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 512))
from ipc.process.open_files import raise_limit
raise_limit()
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout == "(512, 512)\n"


@pytest.mark.parametrize("command", [["serve"], ["gateway", "--port", "0"]])
def test_too_few_files_for_any_client_are_told(command: list[str]) -> None:
    """Before anything is loaded: a daemon was ready, and each of its clients waited in vain."""
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from ipc.commands.cli import main
sys.exit(main({command}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == MISCONFIGURED and "Traceback" not in done.stderr
    assert "64 files may be open at once, which leaves none for clients: allow 128 or more" in done.stderr
