"""Client and daemon on two machines, with a bad network between them: packets late, lost, and a cable cut and mended.

    python -m scripts.bad_network [--silence 30] [--delay 0.025] [--loss 0.02]

The machines are network namespaces, and the network is this program: it has a TUN device in each and passes packets on as
late, and as seldom, as it is told to. It needs no rights but to make namespaces of its own (`unshare --user --net`).
"""

import argparse
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from driver.errors import DriverStopped
from driver.request import ActiveRequest, ReturnSample, Usage
from engine.metrics.engine_stats import EngineStats
from engine.request_limits import ServingLimits
from ipc.client import Client
from ipc.connection import session
from ipc.errors import ConnectionLost
from ipc.server.work import client_table as clients
from ipc.server.work import rounds
from ipc.server.zmq_server import Server
from ipc.sockets.auth import Authority
from ipc.wire import keys

DAEMON, CLIENT = "10.77.0.1", "10.77.0.2"
ADDRESS = f"tcp://{DAEMON}:7777"
STREAMS, TOKENS, LONG = 20, 200, 1000
SECONDS_PER_TOKEN = 0.003
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
LARGEST_PACKET = 65536


class CountingDriver:
    """Gives every request its places as token ids, 0, 1, 2 and so on: whatever is lost, or comes twice, shows."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[ActiveRequest, int]] = {}
        self._lock = threading.Lock()

    def submit_request(self, request: ActiveRequest) -> None:
        """Begin, or go on behind what the client has."""
        have = request.resume_token_ids[0] if request.resume_token_ids else []
        with self._lock:
            self._open[request.request_id] = request, len(have)

    def abort(self, request_id: str) -> bool:
        """Forget it, as its client is gone."""
        with self._lock:
            return self._open.pop(request_id, None) is not None

    def status(self) -> EngineStats:
        """How many are open."""
        return EngineStats(running=len(self._open))

    def refuse(self, *_: object) -> None:
        """Nobody asks for that here."""
        raise DriverStopped("this driver only counts")

    sleep = wake = profile = requests = reset_prefix_cache = refuse

    def run(self) -> None:
        """A token for each, again and again."""
        while True:
            time.sleep(SECONDS_PER_TOKEN)
            with self._lock:
                for request_id, (request, place) in list(self._open.items()):
                    ends = place + 1 == request.params["max_tokens"]
                    request.channel.put(
                        ReturnSample(
                            request_id=request_id,
                            token_ids=[place],
                            finish_reason="length" if ends else None,
                            usage=Usage(1, place + 1) if ends else None,
                        )
                    )
                    self._open[request_id] = request, place + 1
                    if ends:
                        del self._open[request_id]


class Network:
    """Carries packets between two devices: each ``delay`` seconds late, and of all the share ``loss`` not at all."""

    def __init__(self, ends: tuple[int, int], delay: float, loss: float) -> None:
        self.cut = False
        self._to = {ends[0]: ends[1], ends[1]: ends[0]}
        self._delay = delay
        self._loss = loss
        self._rng = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def run(self) -> None:
        """For ever."""
        serial = 0
        while True:
            patience = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for end in select.select(list(self._to), [], [], patience)[0]:
                packet, serial = os.read(end, LARGEST_PACKET), serial + 1
                if not self.cut and self._rng.random() >= self._loss:
                    heapq.heappush(self._under_way, (time.monotonic() + self._delay, serial, self._to[end], packet))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                os.write(self._under_way[0][2], heapq.heappop(self._under_way)[3])


def device(ip: str) -> int:
    """A TUN device of this namespace, with this address."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    for command in ("link set lo up", f"address add {ip}/24 dev tun0", "link set tun0 up"):
        subprocess.run(["ip", *command.split()], check=True)
    return end


def be_the_client(line: socket.socket, key: Path) -> None:
    """Say on the line when the cable is to be cut and mended."""
    socket.send_fds(line, [b"here"], [device(CLIENT)])
    line.recv(100)

    def ask(what: bytes) -> None:
        line.send(what)
        line.recv(100)

    with Client(ADDRESS, key=key, timeout=60) as client, Client(ADDRESS, key=key, timeout=60, resume=True) as resuming:
        streams = [client.generate([1], max_tokens=TOKENS) for _ in range(STREAMS)]
        for stream in streams:
            assert [id_ for piece in stream for id_ in piece.token_ids] == list(range(TOKENS))
        print(f"{STREAMS} streams of {TOKENS} tokens: whole", flush=True)

        lost, resumed = client.generate([1], max_tokens=LONG), resuming.generate([1], max_tokens=LONG)
        next(lost)
        token_ids = next(resumed).token_ids
        ask(b"cut")
        began = time.monotonic()
        try:
            list(lost)
            raise AssertionError("the cable was not cut")
        except ConnectionLost as error:
            print(f"cut: the client hears of it after {time.monotonic() - began:.1f} s: {error}", flush=True)
        ask(b"idle")
        print(f"the daemon has aborted its work after {time.monotonic() - began:.1f} s", flush=True)
        ask(b"mend")
        token_ids += [id_ for piece in resumed for id_ in piece.token_ids]
        assert token_ids == list(range(LONG)), "tokens were lost, or came twice"
        print(f"mended: the stream that is resumed has all of its {LONG:,} tokens, each once", flush=True)


def be_the_daemon(line: socket.socket, directory: Path, delay: float, loss: float) -> None:
    """And the network; does what the client asks of the cable."""
    theirs = socket.recv_fds(line, 100, 1)[1][0]
    network, driver = Network((device(DAEMON), theirs), delay, loss), CountingDriver()
    for run in (network.run, driver.run):
        threading.Thread(target=run, daemon=True).start()
    server = Server(ADDRESS, sys.exit, sys.exit, sys.exit, sys.exit, Authority(directory))
    server.start()
    server.open(driver, "numbers", ServingLimits(2 * LONG, 2 * LONG, ()))
    line.send(b"ready")
    while asked := line.recv(100):
        if asked == b"idle":
            while driver.status().running:
                time.sleep(0.05)
        else:
            network.cut = asked == b"cut"
        line.send(b"done")
    network.cut = False
    server.stop()


def main() -> int:
    """Make the namespaces, be both sides, and return the exit code."""
    parser = argparse.ArgumentParser("scripts/bad_network.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--silence", type=float, default=session.SILENCE_LIMIT, help="seconds until a peer is lost")
    parser.add_argument("--delay", type=float, default=0.025, help="seconds that each packet takes")
    parser.add_argument("--loss", type=float, default=0.02, help="share of packets that are lost")
    parser.add_argument("--line", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory is None:
        with tempfile.TemporaryDirectory() as name:
            keys.new(Path(name, "keys"), "client", Path(name, "client.key"))
            return subprocess.run([*_myself("--map-root-user"), "--directory", name]).returncode
    for module in (clients, rounds, session):
        module.SILENCE_LIMIT, module.PING_INTERVAL = options.silence, options.silence / 6  # type: ignore[attr-defined]
    if options.line is not None:
        be_the_client(socket.socket(fileno=options.line), options.directory / "client.key")
        return 0
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = [*_myself(), "--directory", str(options.directory), "--line", str(far.fileno())]
    with subprocess.Popen(told, pass_fds=[far.fileno()]) as client:
        far.close()
        be_the_daemon(near, options.directory / "keys", options.delay, options.loss)
        return client.wait()


def _myself(*flags: str) -> list[str]:
    """This program, as it was called, in a network namespace of its own."""
    return ["unshare", *flags, "--net", sys.executable, "-m", "scripts.bad_network", *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(main())
