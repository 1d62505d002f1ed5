"""Processes of ``odriver`` that live as long as this one, and no longer however it ends."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Runs a command that gets SIGTERM when its parent dies (prctl(2), PR_SET_PDEATHSIG). A ``preexec_fn`` could say so too, but
would fork this process, which one with threads, such as JAX's, must not.
"""


def free_port() -> int:
    """Of TCP at 127.0.0.1, for a server that has to be told one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class Ready(NamedTuple):
    """A process that serves, and the last that it said of how it is (sd_notify(3))."""

    process: "subprocess.Popen[bytes]"
    status: str


class Starting(NamedTuple):
    """A process that has been started, and the socket to which it says how it is."""

    process: "subprocess.Popen[bytes]"
    news: socket.socket

    def wait(self, on_status: Callable[[str], None] = lambda _: None) -> Ready:
        """Until it is READY, with each STATUS of it meanwhile; if it dies before, exit as it did."""
        ended, status = os.pidfd_open(self.process.pid), ""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.news, selectors.EVENT_READ)
                selector.register(ended, selectors.EVENT_READ)
                while True:
                    if self.news not in {key.fileobj for key, _ in selector.select()}:
                        sys.exit(self.process.wait())
                    said = dict(line.split("=", 1) for line in self.news.recv(4096).decode().splitlines())
                    status = said.get("STATUS", status)
                    if said.get("READY") == "1":
                        return Ready(self.process, status)
                    on_status(status)
        finally:
            os.close(ended)


@contextmanager
def odriver(*arguments: str) -> Iterator[Ready]:
    """The command with these arguments, when it is READY; if it dies before, exit as it did.

    It hears no Ctrl-C, and no configuration of this machine holds.
    """
    with starting(*arguments) as process:
        yield process.wait()


@contextmanager
def starting(*arguments: str, **environment: str) -> Iterator[Starting]:
    """The same, at once."""
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory, _listening(f"{directory}/notify") as news:
        notify = {"NOTIFY_SOCKET": f"{directory}/notify", "ODRIVER_CONFIG": os.devnull}
        process = subprocess.Popen(
            [sys.executable, "-ISc", MORTAL, str(Path(sys.executable).with_name("odriver")), *arguments],
            env={**os.environ, **notify, **environment},
            start_new_session=True,
        )
        try:
            yield Starting(process, news)
        finally:
            process.terminate()
            process.wait()


def end_on_sigterm() -> None:
    """As on Ctrl-C: every with statement is left in order."""
    signal.signal(signal.SIGTERM, _exit)


@contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(path)
        yield news


def _exit(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)
