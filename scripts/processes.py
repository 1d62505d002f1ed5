"""Processes of ``odriver`` that live as long as this one, and no longer however it ends."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs a command that gets SIGTERM when its parent dies (prctl(2), PR_SET_PDEATHSIG). A ``preexec_fn`` could say so too, but
would fork this process, which one with threads, such as JAX's, must not.
"""


class Ready(NamedTuple):
    """A process that serves, and the last that it said of how it is (sd_notify(3))."""

    process: "subprocess.Popen[bytes]"
    status: str


@contextmanager
def odriver(*arguments: str) -> Iterator[Ready]:
    """The command with these arguments, when it is READY; if it dies before, exit as it did.

    It hears no Ctrl-C, and no configuration of this machine holds.
    """
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory, _listening(f"{directory}/notify") as news:
        process = subprocess.Popen(
            [sys.executable, "-c", MORTAL, str(Path(sys.executable).with_name("odriver")), *arguments],
            env={**os.environ, "NOTIFY_SOCKET": f"{directory}/notify", "ODRIVER_CONFIG": os.devnull},
            start_new_session=True,
        )
        try:
            yield Ready(process, _wait_until_ready(process, news))
        finally:
            process.terminate()
            process.wait()


def wait_for_first(*processes: "subprocess.Popen[bytes]") -> int:
    """Until one of them ends; its exit code."""
    ends = {os.pidfd_open(process.pid): process for process in processes}
    try:
        with selectors.DefaultSelector() as selector:
            for end in ends:
                selector.register(end, selectors.EVENT_READ)
            [(key, _), *_] = selector.select()
        return ends[key.fd].wait()
    finally:
        for end in ends:
            os.close(end)


def end_on_sigterm() -> None:
    """As on Ctrl-C: every with statement is left in order."""
    signal.signal(signal.SIGTERM, _exit)


@contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(path)
        yield news


def _wait_until_ready(process: "subprocess.Popen[bytes]", news: socket.socket) -> str:
    """Until it says READY=1: what its STATUS was."""
    ended, status = os.pidfd_open(process.pid), ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(news, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                if news not in {key.fileobj for key, _ in selector.select()}:
                    sys.exit(process.wait())
                said = dict(line.split("=", 1) for line in news.recv(4096).decode().splitlines())
                status = said.get("STATUS", status)
                if said.get("READY") == "1":
                    return status
    finally:
        os.close(ended)


def _exit(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)
