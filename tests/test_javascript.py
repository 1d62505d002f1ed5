"""The client in another language, which knows no more of oDriver than ipc/PROTOCOL.md says."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_driver import PATIENCE, FakeDriver, serving

from ipc.sockets.auth import Authority
from ipc.wire import keys
from ipc.wire.messages import CREDITS

EXAMPLE = Path(__file__).parent.parent / "scripts" / "examples" / "client.mjs"
PACKAGES = ("zeromq", "@msgpack/msgpack")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The example, beside its packages; the test is skipped where those, or node itself, are not here."""
    places = [EXAMPLE.parent / "node_modules", *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(":")))]
    found = next((place for place in places if all((place / name).is_dir() for name in PACKAGES)), None)
    if shutil.which("node") is None or found is None:
        pytest.skip("needs node, and `npm install zeromq@6 @msgpack/msgpack@3` in scripts/examples")
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "node_modules").symlink_to(found.resolve())
    return tmp_path


@pytest.fixture
def driver(directory: Path) -> Iterator[FakeDriver]:
    """Served at o.sock."""
    driver = FakeDriver()
    with serving(f"ipc://{directory}/o.sock", driver):
        yield driver


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The example, to its end."""
    command = ["node", "client.mjs", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.usefixtures("driver")
def test_it_streams_a_completion(directory: Path) -> None:
    """To stdout."""
    done = run(directory, "once upon a time", "--connect", f"ipc://{directory}/o.sock")

    assert (done.returncode, done.stdout, done.stderr) == (0, "onceuponatime\n", "")


def test_it_gives_credit(directory: Path, driver: FakeDriver) -> None:
    """A stream of many messages comes to its end, though each waits until it has been read."""
    command = ["node", "client.mjs", "hold", "--connect", f"ipc://{directory}/o.sock"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        request = driver.take()
        assert process.stdout is not None
        for number in range(3 * CREDITS):
            driver.say(request, f"{number}.", [number])
            assert "".join(process.stdout.read(1) for _ in f"{number}.") == f"{number}."
        driver.finish(request)
        assert process.stdout.read() == "\n"
        assert process.wait(PATIENCE) == 0
    assert request.params == {"max_tokens": 64}


@pytest.mark.usefixtures("driver")
def test_it_says_what_was_refused(directory: Path, driver: FakeDriver) -> None:
    """On stderr, with an exit code."""
    driver.drain(lambda: None)

    done = run(directory, "x", "--connect", f"ipc://{directory}/o.sock")

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "draining: enough\n")


def test_it_connects_with_a_key(directory: Path) -> None:
    """The same file that a Python client takes."""
    keys.new(directory / "keys", "js", directory / "js.key")
    driver, address = FakeDriver(), f"ipc://{directory}/secure.sock"

    with serving(address, driver, authority=Authority(directory / "keys")):
        done = run(directory, "once upon", "--connect", address, "--key", "js.key")

    assert (done.returncode, done.stdout, done.stderr) == (0, "onceupon\n", "")
    assert driver.submitted[0].tenant == "js"
