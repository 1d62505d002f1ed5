"""The daemon's side of its sockets' processes: starting, watching and killing them."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import zmq

from ipc.sockets.link import Link

_PATHS = [str(Path(__file__).parents[2]), str(Path(zmq.__file__ or "").parents[1])]
_PROGRAM = "import sys; sys.path[:0] = {paths}; from ipc.sockets.fork_server import main; main({control})"
_REPORT_PATIENCE = 0.5
"""Seconds to wait for the report of an ended process."""


class Spawned:
    """A process that owns one socket: a link to it and a way to kill it."""

    def __init__(self, link: Link, report: socket.socket) -> None:
        self.link = link
        self._report = report

    def how_it_ended(self) -> str:
        """In words, once the link is lost."""
        self._report.settimeout(_REPORT_PATIENCE)
        try:
            code = int(self._report.recv(16) or b"0")
        except OSError:
            code = 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else "ended"

    def kill(self) -> None:
        """Kill it: the link is then lost."""
        self._report.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill it, if it runs, and close the link."""
        self._report.close()
        self.link.close()


class Spawner:
    """Starts processes through the fork server, which it starts when needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Two threads may find the fork server dead at once."""
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def spawn(self, listening: socket.socket) -> Spawned:
        """A process for a socket that listens. Raises OSError where there can be none now."""
        ours, theirs = socket.socketpair()
        our_report, their_report = socket.socketpair()
        with theirs, their_report:
            try:
                self._send([theirs.fileno(), listening.fileno(), their_report.fileno()])
            except BaseException:
                ours.close()
                our_report.close()
                raise
        return Spawned(Link(ours), our_report)

    def stop(self) -> None:
        """End the fork server and its children; a second call does nothing."""
        with self._lock:
            self._close()

    def _send(self, descriptors: list[int]) -> None:
        with self._lock:
            if self._control is not None:
                try:
                    socket.send_fds(self._control, [b"+"], descriptors)
                    return
                except OSError:
                    self._close()
            socket.send_fds(self._started(), [b"+"], descriptors)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = _PROGRAM.format(paths=_PATHS, control=theirs.fileno())
            # Without site and environment, which it does not need, and in a session of its own,
            # without a terminal.
            command = [sys.executable, "-I", "-S", "-c", program]
            try:
                self._server = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self._control = ours
        return ours

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            if self._server.poll() is None:
                self._server.kill()  # it has no state, and its children die with it
            self._server.wait()
            self._server = None
