"""Traces: the profiler itself, and asked for over the socket and on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from fake_driver import PATIENCE, serving
from fakes import FakeEngine, FakeTokenizer

from driver.errors import DriverStopped
from driver.odriver import oDriver
from driver.request import QueueChannel
from engine.profiler import Profiler, ProfilerError
from ipc.client import Client, RequestFailed
from ipc.control_client import ControlClient

ROOT = Path(__file__).parent.parent


@pytest.fixture
def address(tmp_path):
    """Where the daemon under test listens."""
    return f"ipc://{tmp_path}/o.sock"


@pytest.fixture
def driver(address):
    """A driver with real threads, being served."""
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    with serving(address, driver):
        yield driver
        driver.stop("the test is over")


def traces(directory):
    """The traces in a directory."""
    return list(directory.rglob("*.xplane.pb"))


def test_a_profile_is_written_when_it_is_stopped(tmp_path):
    """Into a directory that is made if need be; then another may be started."""
    profiler = Profiler()

    for name in ("first", "second"):
        profiler.start(str(tmp_path / "made" / name))
        jnp.ones(3).sum().block_until_ready()
        assert profiler.stop() == str(tmp_path / "made" / name)

        assert len(traces(tmp_path / "made" / name)) == 1


def test_a_second_profile_is_refused_and_the_first_goes_on(tmp_path):
    """It says where the one under way goes."""
    profiler = Profiler()
    profiler.start(str(tmp_path / "a"))

    with pytest.raises(ProfilerError, match=r"a profile for .*/a is running already: stop it first"):
        profiler.start(str(tmp_path / "b"))

    profiler.stop()
    assert len(traces(tmp_path / "a")) == 1


def test_no_profile_is_stopped_where_none_runs():
    """It says so."""
    with pytest.raises(ProfilerError, match="no profile is running: start one first"):
        Profiler().stop()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    """And leaves the profiler free to start elsewhere."""
    (tmp_path / "file").touch()
    profiler = Profiler()

    with pytest.raises(ProfilerError, match=r"cannot profile into .*/file/in"):
        profiler.start(str(tmp_path / "file" / "in"))

    profiler.start(str(tmp_path))
    profiler.stop()


def test_what_is_no_path_is_refused():
    """A null byte, which no file name holds, is the client's mistake and does not end the execution thread."""
    with pytest.raises(ProfilerError, match="cannot profile into"):
        Profiler().start("a\0b")


@pytest.mark.usefixtures("driver")
def test_a_client_starts_and_stops_a_profile(address, tmp_path):
    """The daemon serves meanwhile, and what comes at the wrong time is refused for that client alone."""
    with Client(address) as client, ControlClient(address) as control:
        with pytest.raises(RequestFailed, match="no profile is running"):
            control.stop_profile()

        assert control.start_profile(str(tmp_path)) == str(tmp_path)
        assert client.complete("abc", max_tokens=3).text == "abc"
        with pytest.raises(RequestFailed, match="is running already") as refused:
            control.start_profile(str(tmp_path))
        assert control.stop_profile() == str(tmp_path)

    assert refused.value.code == "invalid_request"
    assert len(traces(tmp_path)) == 1


def test_a_driver_that_has_stopped_profiles_no_more(driver):
    """It says so at once, rather than never answering."""
    driver.stop("enough")

    with pytest.raises(DriverStopped, match="enough"):
        driver.profile("a", None, QueueChannel())


def odriver_profile(address, directory, *arguments):
    """The command, run to its end in a directory."""
    command = [sys.executable, "-c", "import sys; from ipc.cli import main; sys.exit(main())", "profile", *arguments]
    return subprocess.run(
        [*command, "--connect", address],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.usefixtures("driver")
def test_odriver_profile_writes_where_the_user_is(address, tmp_path):
    """Though the daemon runs elsewhere."""
    started = odriver_profile(address, tmp_path, "start", "here")
    stopped = odriver_profile(address, tmp_path, "stop")

    assert (started.returncode, started.stderr) == (0, "")
    assert (stopped.returncode, stopped.stdout) == (0, f"{tmp_path}/here\n")
    assert len(traces(tmp_path / "here")) == 1


@pytest.mark.usefixtures("driver")
def test_odriver_profile_says_why_not(address, tmp_path):
    """On stderr, with an exit code of 1."""
    stopped = odriver_profile(address, tmp_path, "stop")

    assert (stopped.returncode, stopped.stderr) == (1, "odriver: no profile is running: start one first\n")
