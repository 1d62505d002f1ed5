"""The gateway of a daemon, as a process of its own that lives as long as the daemon.

They are joined by a socket, which tells the gateway of the daemon's end however that comes, and
the daemon of the gateway's start. What an operator changes in the daemon goes over it too
(gateway_orders.py). The gateway's end is seen by waiting for its process.
"""

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ipc.errors import AddressInUse, KeyFileError
from ipc.process import gateway_orders
from ipc.process.gateway_orders import Log, Order, Reloaded, ReloadKeys
from ipc.process.http_socket import listen, url_of

logger = logging.getLogger(__name__)

SERVING = b"serving"
"""What the gateway sends when it serves; otherwise it sends why it cannot."""
ANSWER_TIMEOUT = 5.0
"""Seconds for it to read its API keys again."""
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from ipc.gateway.companion import main; sys.exit(main({control}))"
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Variables that are for the daemon alone."""


class GatewayProcess:
    """A gateway at this address; ``options`` are those of ``http_server.serve``.

    ``bind`` raises AddressError; ``or_any_port`` takes a free port where that one is taken.
    """

    def __init__(self, host: str, port: int, *, or_any_port: bool, **options: Any) -> None:
        self._host, self._port, self._or_any_port = host, port, or_any_port
        self._options = options
        self._when_finished: Callable[[], None] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        """For its key."""
        self._settled = threading.Event()
        """Set once the gateway serves, or has ended."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._serials = itertools.count(1)
        self._answers: queue.SimpleQueue[Reloaded | None] = queue.SimpleQueue()
        """None, for good, once it has ended."""

    def start(self, address: str, issue_key: Callable[[Path], None] | None, on_end: Callable[[int, str], None]) -> None:
        """Listen, and start the process, for the daemon at this address.

        ``issue_key`` writes a key, where the daemon asks for one. ``on_end`` is called on a thread
        when the process has ended by itself, with its exit code and how.
        """
        with self._listen() as listening:
            self.url = url_of(listening, is_encrypted=bool(self._options.get("ssl_certfile")))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                program = _PROGRAM.format(path=str(Path(__file__).parents[2]), control=theirs.fileno())
                environment = {name: value for name, value in os.environ.items() if name not in _SYSTEMD}
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", program],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the daemon, which ends the gateway
                )
            options = self._options | {"address": address, "key": self._key(issue_key)}
            socket.send_fds(ours, [msgspec.msgpack.encode(options, enc_hook=str)], [listening.fileno()])
        self._control = ours
        threading.Thread(target=self._watch, args=(ours, on_end), name="gateway", daemon=True).start()

    def wait_until_settled(self) -> None:
        """Wait until it serves, or has ended."""
        self._settled.wait()

    def log(self, level: str, log_format: str) -> None:
        """Have it log so; on any thread, and it waits for nothing."""
        self._order(Log(level, log_format))

    def reload(self) -> str:
        """Have it read its API keys again; says how many there are, nothing if it has no file or has
        ended.

        Raises KeyFileError, and changes nothing then.
        """
        serial, until = next(self._serials), time.monotonic() + ANSWER_TIMEOUT
        self._order(ReloadKeys(serial))
        try:
            while answer := self._answers.get(timeout=max(0, until - time.monotonic())):
                if answer.serial == serial:  # others come too late for whoever asked
                    break
        except queue.Empty:
            raise KeyFileError("the gateway does not say whether it has read its API keys again") from None
        if answer is None:
            self._answers.put(None)
            return ""
        if answer.error:
            raise KeyFileError(answer.error)
        return answer.text

    def finish(self, when_finished: Callable[[], None]) -> None:
        """Have it send what is open, take nothing new, and end; then this is called, on any
        thread."""
        self._when_finished = when_finished
        self._signal(signal.SIGTERM)

    def stop(self, timeout: float) -> None:
        """The same, and kill it after this many seconds; without a process, nothing."""
        if self._process is None:
            return
        self.finish(lambda: None)
        if not self._settled.is_set():
            self._process.kill()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._directory is not None:
            self._directory.cleanup()

    def _key(self, issue: Callable[[Path], None] | None) -> Path | None:
        if issue is None:
            return None
        self._directory = tempfile.TemporaryDirectory(prefix="odriver-")
        path = Path(self._directory.name, "gateway.key")
        issue(path)
        return path

    def _listen(self) -> socket.socket:
        try:
            return listen(self._host, self._port)
        except AddressInUse:
            if not self._or_any_port:
                raise
            return listen(self._host, 0)

    def _order(self, order: Order) -> None:
        if self._control is None:
            return
        try:
            self._control.send(gateway_orders.write(order), socket.MSG_DONTWAIT)
        except OSError as error:
            if self._when_finished is not None:  # it was told to end
                return
            logger.warning("the gateway does not hear the daemon: %s", error)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._settled.is_set():
            self._process.send_signal(number)

    def _watch(self, control: socket.socket, on_end: Callable[[int, str], None]) -> None:
        """Keep the daemon's end of the socket open until the process has ended."""
        assert self._process is not None
        first = b""
        with control:
            try:
                first = control.recv(gateway_orders.LONGEST)
                if first == SERVING:
                    self._settled.set()
                    while answer := control.recv(gateway_orders.LONGEST):
                        self._answers.put(gateway_orders.read_answer(answer))
            except ConnectionResetError:  # it has died before it read all that it was sent
                pass
            self._answers.put(None)
            code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._when_finished is not None:
            self._when_finished()
        else:
            on_end(code, first.decode() if first not in (b"", SERVING) else f"the gateway {how}")
        self._settled.set()
