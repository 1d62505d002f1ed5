"""The limit of open files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
