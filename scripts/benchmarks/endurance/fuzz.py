"""Frames that are almost messages. Whatever bytes come, the decoder raises MessageError or nothing, and the daemon answers
whoever sent them or cuts them off, keeps no memory of it, and serves everybody else as ever.
"""

import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec
import psutil
import zmq

from ipc.client import Client
from ipc.errors import OdriverError
from ipc.wire import codec, operations
from ipc.wire.addresses import control_address
from ipc.wire.codec import MessageError
from ipc.wire.messages import PROTOCOL_VERSION, Abort, Credit, Generate, Hello, Ping, Pong
from ipc.wire.operations import LogLevel, Status
from scripts.benchmarks.endurance.generated import ask_by_http, ask_by_zeromq
from scripts.benchmarks.figures.figure import Figure, MeasurementFailed, figure
from scripts.benchmarks.host import NULL_DAEMON
from scripts.benchmarks.processes.child import Child, ChildFailed
from scripts.processes import odriver

FRAMES, BATCH, REQUESTS = 10**6, 200, 10**5
PATIENCE_MS = 30_000
"""Milliseconds after which a peer is taken for neither answered nor cut off."""
ROWS = 8
GOOD_PROMPT, GOOD_TOKENS = [1, 2, 3], 16
MEGABYTE = 2**20

SEEDS = [
    codec.encode(message)
    for message in (
        Hello(PROTOCOL_VERSION),
        Generate("a", prompt="Once upon a time", params={"max_tokens": 4, "temperature": 0.5, "stop": ["x"]}),
        Generate("b", prompt=[1, 2, 3], params={"max_tokens": 4}, stream=False),
        Generate("c", messages=[{"role": "user", "content": "hi"}], params={"max_tokens": 2}),
        Abort("a"),
        Credit("a", 3),
        Ping(),
        Pong(),
        Status("s"),
        operations.AbortRequest("t", "00:a"),
        LogLevel("u", "info"),
    )
]
"""What is mutated. Not the commands that would do what they say: drain, sleep, profile."""


def mutated(rng: random.Random) -> bytes:
    """A frame with some bytes changed, gone, doubled, swapped for another's, or nothing but rubbish."""
    frame = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(7):
            case 0 | 1 if frame:
                frame[at - 1] = rng.randrange(256)
            case 2:
                frame[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                del frame[at : at + rng.randrange(1, 9)]
            case 4:
                frame[at:] = rng.choice(SEEDS)[at:]
            case 5:
                frame[at:at] = frame[at : at + 16]
            case 6 if rng.randrange(100) == 0:
                frame[at:at] = rng.choice((b"\x91", b"\xdf\xff\xff\xff\xff", b"\xc1")) * rng.randrange(1, 10_000)
    return bytes(frame)


def decode_mutated(count: int, seed: int) -> int:
    """Have every decoder read so many frames; how many were messages after all. Anything but MessageError is raised."""
    rng, understood = random.Random(seed), 0
    for _ in range(count):
        frame = mutated(rng)
        codec.peek_request_id(frame)
        for decode in (
            codec.decode_client_message,
            codec.decode_control_message,
            codec.decode_server_message,
        ):
            try:
                decode(frame)
                understood += 1
            except MessageError:
                pass
    return understood


class FuzzFailed(MeasurementFailed):
    """Somebody was not answered, or not as before; the message says who."""


class BadPeer:
    """A connection that sends mutated frames, of one part or several, and asks now and then whether it is answered."""

    def __init__(self, address: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._probes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def send(self, count: int) -> bool:
        """Send so many frames; whether something was answered to what came after them, within PATIENCE_MS."""
        for _ in range(count):
            frames = [mutated(self._rng) for _ in range(self._rng.choice((1,) * 50 + (2, 3)))]
            self._dealer.send_multipart(frames)
        self._probes += 1
        probe = f"probe {self._probes}"
        self._dealer.send(codec.encode(Abort(probe) if self._rng.randrange(2) else Status(probe)))
        self._dealer.send(msgspec.msgpack.encode({"type": "unheard of", "request_id": probe}))
        while self._dealer.poll(PATIENCE_MS):
            if codec.peek_request_id(self._dealer.recv()) == probe:
                return True
        return False


def send_rubbish(path: str, rng: random.Random) -> None:
    """Connect to a socket file, say what is not even ZeroMQ, and leave."""
    with socket.socket(socket.AF_UNIX) as rubbish:
        rubbish.connect(path)
        with suppress(BrokenPipeError):  # cut off in the middle, as it should be
            rubbish.sendall(rng.randbytes(rng.randrange(1, 4096)))


def attack(address: str, count: int, seed: int) -> int:
    """Send so many frames to the work and the control socket of an ``ipc://`` address; how many batches went unanswered."""
    rng, unanswered, left = random.Random(seed), 0, count
    sockets = (address, control_address(address))
    while left > 0:
        with BadPeer(sockets[0], rng.randrange(2**32)) as first, BadPeer(sockets[1], rng.randrange(2**32)) as second:
            for peer in (first, first, first, second) * 5:  # and then new ones, as peers come and go
                size = min(left, BATCH)
                unanswered += size > 0 and not peer.send(size)
                left -= size
        send_rubbish(rng.choice(sockets).removeprefix("ipc://"), rng)
    return unanswered


class GoodPeer:
    """A client that asks the same again and again meanwhile; it counts its answers and those that are not as before."""

    def __init__(self, address: str) -> None:
        self.answers = self.failures = 0
        self._client = Client(address)
        self._expected = self._ask()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.answers += 1
            try:
                self.failures += self._ask() != self._expected
            except OdriverError:
                self.failures += 1

    def _ask(self) -> list[int]:
        pieces = self._client.generate(GOOD_PROMPT, max_tokens=GOOD_TOKENS, temperature=0, ignore_eos=True)
        return [token_id for piece in pieces for token_id in piece.token_ids]


def measure_fuzz(count: int, requests: int, seed: int) -> Iterator[Figure]:
    """Frames and requests a second, and what must be 0: whoever is unanswered, failures of good peers; and what the
    daemon has grown.

    Raises ChildFailed if it ends, and at the end FuzzFailed where one of them is not 0.
    """
    began = time.perf_counter()
    decode_mutated(count, seed)
    yield figure("fuzz", f"{count:,} frames to the decoders", "frames/s", [count / (time.perf_counter() - began)])
    with tempfile.TemporaryDirectory(prefix="odriver-bench-") as directory:
        address = f"ipc://{directory}/o.sock"
        with Child(NULL_DAEMON, address, str(ROWS)) as daemon:
            daemon.ask({}, float)
            process = psutil.Process(daemon.pid)
            with GoodPeer(address) as good:
                attack(address, count // 10, seed)  # not counted: what happens once only has happened then
                before, began = process.memory_info().rss, time.perf_counter()
                unanswered = attack(address, count, seed + 1)
                rate = count / (time.perf_counter() - began)
            grown = (process.memory_info().rss - before) / MEGABYTE
            daemon.ask({}, float)  # it lives
            rates, lost = _ask_generated(address, requests, seed)
            daemon.ask({}, float)  # it lives on
    yield figure("fuzz", f"{count:,} frames to the sockets", "frames/s", [rate])
    for way, asked, per_second in zip(("ZeroMQ", "HTTP"), _halves(requests), rates, strict=True):
        yield figure("fuzz", f"{asked:,} generated requests by {way}", "req/s", [per_second])
    yield figure("fuzz", "of them without an end", "", [lost], more_is_better=False)
    yield figure("fuzz", "batches unanswered", "", [unanswered], more_is_better=False)
    yield figure("fuzz", "answers to a good peer meanwhile", "", [good.answers])
    yield figure("fuzz", "of them wrong or none", "", [good.failures], more_is_better=False)
    yield figure("fuzz", "memory that the daemon has grown by", "MB", [grown], more_is_better=False)
    if unanswered or lost or good.failures:
        raise FuzzFailed(
            f"{unanswered} batches and {lost} requests were not answered, and {good.failures} good ones wrongly"
        )


def _halves(requests: int) -> tuple[int, int]:
    return requests - requests // 2, requests // 2


def _ask_generated(address: str, requests: int, seed: int) -> tuple[list[float], int]:
    """Half of them by ZeroMQ and half through a gateway: how many a second of each, and how many had no end."""
    rates, lost = [], 0
    with odriver("gateway", "--connect", address, "--port", "0", "--log-level", "error") as web:
        url = web.status.removeprefix("http://")
        for ask, at, count in zip((ask_by_zeromq, ask_by_http), (address, url), _halves(requests), strict=True):
            began = time.perf_counter()
            lost += ask(at, count, seed)
            rates.append(count / (time.perf_counter() - began))
        if web.process.poll() is not None:
            raise ChildFailed(f"the gateway ended with exit code {web.process.returncode}")
    return rates, lost
