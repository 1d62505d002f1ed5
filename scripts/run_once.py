"""A completion from a daemon that lives for it alone: starts one, streams, stops it."""

import ctypes
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
from typing import NoReturn

from ipc.client import Client, OdriverError
from ipc.control_client import ControlClient

PR_SET_PDEATHSIG = 1


def main(prompt: str) -> int:
    """Print the prompt and what the model makes of it. The exit code is the daemon's own where that failed."""
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/odriver.sock"
        try:
            with _daemon(address, Path(directory) / "notify") as daemon, Client(address) as client:
                with ControlClient(address) as control:
                    control.set_log_level("warning")  # it would go on in the middle of the text
                print(prompt, end="", flush=True)
                for piece in client.generate(prompt):
                    print(piece.text, end="", flush=True)
                print()
        except OdriverError as error:
            print(f"odriver: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return daemon.returncode


@contextmanager
def _daemon(address: str, notify: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A daemon that is READY. It hears no Ctrl-C, and dies with this process however that ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(str(notify))
        command = [str(Path(sys.executable).with_name("odriver")), "serve", "--bind", address]
        daemon = subprocess.Popen(
            command,
            env={**os.environ, "NOTIFY_SOCKET": str(notify), "ODRIVER_CONFIG": os.devnull},
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        try:
            _wait_until_ready(daemon, news)
            yield daemon
        finally:
            daemon.terminate()
            daemon.wait()


def _wait_until_ready(daemon: "subprocess.Popen[bytes]", news: socket.socket) -> None:
    """Until the daemon says READY=1; if it dies instead, exit as it did."""
    process = os.pidfd_open(daemon.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(news, selectors.EVENT_READ)
            selector.register(process, selectors.EVENT_READ)
            while True:
                if news not in {key.fileobj for key, _ in selector.select()}:
                    sys.exit(daemon.wait())
                if news.recv(4096) == b"READY=1":
                    return
    finally:
        os.close(process)


def _exit(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
