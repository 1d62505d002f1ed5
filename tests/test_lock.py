"""The versions that scripts/environment.sh installs are such as setup.cfg asks for."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
LINE = re.compile(r"[\w.-]+==\S+( ; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+")


def locked(*files: str) -> dict[str, list[str]]:
    """The versions by package."""
    versions: dict[str, list[str]] = {}
    for file in files:
        for line in (ROOT / "scripts" / "locked" / f"{file}.txt").read_text().splitlines():
            assert LINE.fullmatch(line), line
            name, _, version = line.split(" ")[0].partition("==")
            versions.setdefault(canonicalize_name(name), []).append(version)
    return versions


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (SETUP["options"]["install_requires"], ["base"]),
        (SETUP["options.extras_require"]["tpu"], ["base", "tpu"]),
    ],
)
def test_every_requirement_is_locked_to_a_version_that_it_allows(wanted: str, files: list[str]) -> None:
    """With the hashes of its wheels. After a change of setup.cfg scripts/lock writes them anew."""
    versions = locked(*files)

    for requirement in map(Requirement, filter(None, wanted.splitlines())):
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found and all(requirement.specifier.contains(version) for version in found), requirement
    assert ("libtpu" in versions) == ("tpu" in files)


def test_a_program_beside_a_clone_finds_the_module(tmp_path: Path) -> None:
    """And not the folder, which is called as the module is: the environment has the project's directory on its path."""
    (tmp_path / "odriver" / "ipc").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "from odriver import Client; print(Client.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.stdout == "Client\n", done.stderr
