"""Traces: the profiler itself, and asked for over the socket and on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer

from driver.errors import DriverStopped
from driver.odriver import oDriver
from driver.request import QueueChannel
from engine.metrics.profiler import Profiler, ProfilerError
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.service.configuration import default_profile_directory

ROOT = Path(__file__).parent.parent


@pytest.fixture
def address(tmp_path):
    """Where the daemon under test listens."""
    return f"ipc://{tmp_path}/o.sock"


@pytest.fixture
def driver(address, tmp_path):
    """A driver with real threads, being served."""
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    with serving(address, driver, profiles=tmp_path / "profiles"):
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


def test_after_a_profile_that_could_not_be_written_there_are_others(tmp_path):
    """As on a full disk: JAX kept it for good, and no other was started until the daemon was."""
    profiler = Profiler()
    profiler.start(str(tmp_path / "a"))
    in_the_way = tmp_path / "a" / "plugins"
    in_the_way.touch()
    with pytest.raises(ProfilerError, match=r"the profile for .*/a cannot be written"):
        profiler.stop()
    with pytest.raises(ProfilerError, match=r"cannot profile into .*/b"):
        profiler.start(str(tmp_path / "b"))
    in_the_way.unlink()

    for name in ("a", "b"):  # the name of the one that failed is free, too
        profiler.start(str(tmp_path / name))
        profiler.stop()

        assert len(traces(tmp_path / name)) == 1


def test_a_profile_that_does_not_start_leaves_its_name_free(tmp_path):
    """As beside a trace that something else in the process has started."""
    profiler = Profiler()
    jax.profiler.start_trace(str(tmp_path / "other"))
    try:
        with pytest.raises(ProfilerError, match=r"cannot profile into .*/a: "):
            profiler.start(str(tmp_path / "a"))
    finally:
        jax.profiler.stop_trace()

    profiler.start(str(tmp_path / "a"))
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
        profiler.start(str(tmp_path / "file" / "in" / "it"))

    profiler.start(str(tmp_path / "else"))
    profiler.stop()


@pytest.mark.parametrize("link", [False, True])
def test_what_is_there_already_is_written_to_by_no_profile(tmp_path, link):
    """Neither a directory, which might have links in it, nor where a link leads, though nothing is there yet."""
    if link:
        (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "a").mkdir()

    with pytest.raises(ProfilerError, match="a is there already: choose another name"):
        Profiler().start(str(tmp_path / "a"))

    assert not (tmp_path / "elsewhere").exists()


def test_a_profile_is_its_owners_alone(tmp_path):
    """As what the daemon does is of no concern to others."""
    profiler = Profiler()

    profiler.start(str(tmp_path / "made" / "a"))
    profiler.stop()

    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "made", tmp_path / "made" / "a")] == [0o700, 0o700]


def test_a_client_starts_and_stops_a_profile(address, driver, tmp_path):
    """The daemon serves meanwhile, and what comes at the wrong time is refused for that client alone."""
    del driver
    with Client(address) as client, ControlClient(address) as control:
        with pytest.raises(RequestFailed, match="no profile is running"):
            control.stop_profile()

        assert control.start_profile("a.1_b-2") == f"{tmp_path}/profiles/a.1_b-2"
        assert client.complete("abc", max_tokens=3).text == "abc"
        with pytest.raises(RequestFailed, match="is running already") as refused:
            control.start_profile("other")
        assert control.stop_profile() == f"{tmp_path}/profiles/a.1_b-2"

    assert refused.value.code == "invalid_request"
    assert len(traces(tmp_path / "profiles" / "a.1_b-2")) == 1


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "/tmp/x", "a/b", "a/../../x", "gs://bucket/x", "file:x", ".hidden", "-x", "a\0b", "a\n",
        "a" * 65, "ä", "a\\b", "~", "%2e%2e", "a b",
    ],
)  # fmt: skip
def test_a_path_is_no_name_of_a_profile(address, tmp_path, name):
    """Whatever somebody sends, nothing is written but below the one directory, and no other machine is asked."""
    with ControlClient(address) as control:
        with pytest.raises(RequestFailed, match=r"\$\.name") as refused:
            control.start_profile(name)
        with pytest.raises(RequestFailed, match="no profile is running"):
            control.stop_profile()

    assert refused.value.code == "invalid_request"
    assert not (tmp_path / "profiles").exists()


def test_without_a_directory_for_them_there_are_no_profiles(tmp_path):
    """It says which setting is missing."""
    address = f"ipc://{tmp_path}/none.sock"
    with (
        serving(address, FakeDriver()),
        ControlClient(address) as control,
        pytest.raises(RequestFailed, match="--profile-directory DIR"),
    ):
        control.start_profile("a")


def test_profiles_are_among_the_users_state(monkeypatch):
    """Unless the user has none."""
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_profile_directory() == Path("/state/odriver/profiles")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_profile_directory() == Path("/home/me/.local/state/odriver/profiles")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert default_profile_directory() is None


def test_a_driver_that_has_stopped_profiles_no_more(driver):
    """It says so at once, rather than never answering."""
    driver.stop("enough")

    with pytest.raises(DriverStopped, match="enough"):
        driver.operations.profile("a", None, QueueChannel())


def odriver_profile(address, *arguments):
    """The command, run to its end."""
    command = [
        sys.executable,
        "-c",
        "import sys; from ipc.commands.cli import main; sys.exit(main())",
        "profile",
        *arguments,
    ]
    return subprocess.run(
        [*command, "--connect", address],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", [["here"], pytest.param([], marks=pytest.mark.thorough)])
def test_odriver_profile_says_where_it_writes(address, tmp_path, name):
    """Under the name given, or one made of date and time."""
    started = odriver_profile(address, "start", *name)
    stopped = odriver_profile(address, "stop")

    (directory,) = (tmp_path / "profiles").iterdir()
    assert (started.returncode, started.stderr) == (0, "")
    assert (stopped.returncode, stopped.stdout) == (0, f"{directory}\n")
    assert len(traces(directory)) == 1 and directory.name in (name or [directory.name])


@pytest.mark.usefixtures("driver")
def test_odriver_profile_says_why_not(address):
    """On stderr, with an exit code of 1."""
    stopped = odriver_profile(address, "stop")

    assert (stopped.returncode, stopped.stderr) == (1, "odriver: no profile is running: start one first\n")
