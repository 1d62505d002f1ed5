"""The program that forks the processes of the sockets: it has their imports done, so that a new
one takes milliseconds.

The daemon sends it three descriptors for each: the process's end of the link, the listening
socket, and a socket on which the process's exit status is reported. When the daemon closes its end
of that one, the process is killed; when the daemon is gone, all of them are, and this program
ends.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from types import FrameType

from ipc.sockets import socket_process
from ipc.sockets.link import Link

NUM_DESCRIPTORS = 3
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Meant for the daemon, which then ends us; a terminal may send them to the whole group."""


class ForkServer:
    """Serves one daemon, at the other end of ``control``, until that is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reports: dict[int, tuple[int, socket.socket]] = {}
        """By file descriptor: the process and the socket for its report."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._wake, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._wakeup = wakeup
        self._poll.register(self._wake, select.POLLIN)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.set_wakeup_fd(wakeup.fileno())

    def run(self) -> None:
        """Fork, report and kill."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake.fileno():
                    self._wake.recv(4096)
                    self._reap()
                elif descriptor in self._reports:
                    # The report is then closed when there is nothing to report any more.
                    self._poll.unregister(descriptor)
                    os.kill(self._reports[descriptor][0], signal.SIGKILL)
                elif descriptor == self._control.fileno() and not self._fork():
                    signal.set_wakeup_fd(-1)  # children may end while the interpreter closes what it would write to
                    return

    def _fork(self) -> bool:
        """Make what the daemon asks for; False if it is gone."""
        request, descriptors, _, _ = socket.recv_fds(self._control, 1, NUM_DESCRIPTORS)
        if not request:
            return False
        link, listening, report = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        with link, listening:
            try:
                process = os.fork()
            except OSError:
                report.close()  # the daemon sees the link end, and asks again
                return True
            if process == 0:
                self._be_a_socket_process(link, listening, report)
        self._reports[report.fileno()] = process, report
        self._poll.register(report, select.POLLIN)
        return True

    def _be_a_socket_process(self, link: socket.socket, listening: socket.socket, report: socket.socket) -> None:
        code = os.EX_SOFTWARE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(os.getppid())
            _die_before_others()
            for unneeded in (
                self._control,
                self._wake,
                self._wakeup,
                report,
                *(end for _, end in self._reports.values()),
            ):
                unneeded.close()
            reseed()
            socket_process.run(Link(link), listening)
            code = os.EX_OK
        finally:  # whatever it is: this process is not to go on as the fork server
            if code:
                traceback.print_exc()
            os._exit(code)

    def _reap(self) -> None:
        while self._reports:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            descriptor = next(key for key, (reported, _) in self._reports.items() if reported == process)
            report = self._reports.pop(descriptor)[1]
            with report:
                try:
                    self._poll.unregister(descriptor)
                    report.send(str(os.waitstatus_to_exitcode(status)).encode())
                except (KeyError, OSError):
                    pass  # it was killed as the daemon asked


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wakeup descriptor becomes readable."""
    del number, frame


def reseed() -> None:
    """Start libzmq's count of routing ids anywhere: libzmq draws it from libc's rand(), which
    every fork inherits.

    A client that knew the count could make libzmq abort this process, and each of its successors.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(os.EX_SOFTWARE)


def _die_before_others() -> None:
    """Where memory is short, have the kernel kill this process, and not the one with the weights."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:  # a container may not have it
        file.write(b"1000")


def main(control: int) -> None:
    """Be the program; ``control`` is the file descriptor of the socket to the daemon."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a secret key would be in it
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"odriver-sockets")
    ForkServer(socket.socket(fileno=control)).run()
    sys.exit()
