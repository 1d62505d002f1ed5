"""A program in an environment of its own, with all that it needs at one version."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class CheckFailed(Exception):
    """What a program found; the message says what."""


class Program:
    """The command of that name, installed with pip from these requirements where it is not yet."""

    def __init__(self, name: str, *requirements: str) -> None:
        self._directory = ROOT / ".venv" / "programs" / name
        self._name = name
        self._requirements = requirements

    def run(self, *arguments: str, within: Path, environment: Mapping[str, str] | None = None) -> None:
        """To its end, within a directory, with what it prints shown; raises CheckFailed where it fails."""
        self._install()
        command = [str(self._directory / "bin" / self._name), *arguments]
        ended = subprocess.run(command, env={**os.environ, **(environment or {})}, cwd=within, check=False)
        code = ended.returncode
        if code:
            raise CheckFailed(f"{self._name} ended with exit code {code}")

    def _install(self) -> None:
        stamp, wanted = self._directory / "installed", "\n".join(self._requirements)
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self._directory)], check=True)
        pip = [str(self._directory / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self._requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
