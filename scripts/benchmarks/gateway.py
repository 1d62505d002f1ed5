"""What the HTTP gateway costs beside our own client of the same daemon, and that it leaves nothing behind."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from ipc.benchmark.timeline import Timeline, percentile
from ipc.client import Client
from scripts.benchmarks.clients.http_stream import post
from scripts.benchmarks.clients.latencies import ttfts
from scripts.benchmarks.clients.rates import throughput
from scripts.benchmarks.clients.way import Way
from scripts.benchmarks.clients.workload import Prompts, Workload, timelines_of
from scripts.benchmarks.figures.figure import MICROSECONDS, MILLISECONDS, Figure, MeasurementFailed, figure
from scripts.benchmarks.processes.child import Child
from scripts.benchmarks.processes.daemon import Daemon
from scripts.benchmarks.processes.footprint import Footprint
from scripts.benchmarks.serve import OUTPUT, PROMPT, take_turns
from scripts.processes import odriver

DIRECT_CLIENT, HTTP_CLIENT = "scripts.benchmarks.clients.async_client", "scripts.benchmarks.clients.http_client"
"""Both have one thread: with one for each stream a client would take the processor from what is measured."""
STREAMS = 32
ALONE = 50
"""One-token requests, one after the other."""
IDLE = 500
"""Connections on which nothing comes but comments."""
DISCONNECTS, AT_ONCE = 1000, 64
PATIENCE = 60.0
"""Seconds in which what was hung up on must have ended."""


class GatewayLeaks(MeasurementFailed):
    """Something was left behind by requests that ended; the message says what."""


class Gateway(NamedTuple):
    """A daemon, a gateway to it, and clients of either in processes of their own."""

    daemon: Daemon
    url: str
    pid: int
    direct: Way
    by_http: Way


@contextmanager
def gateway_to(model: Path, settings: list[str]) -> Iterator[Gateway]:
    """All of it, ready."""
    with (
        Daemon(model, *settings) as daemon,
        odriver("gateway", "--connect", daemon.address, "--port", "0", "--log-level", "warning") as web,
        Child(DIRECT_CLIENT, daemon.address) as client,
        Child(HTTP_CLIENT, web.status) as http_client,
    ):
        direct, by_http = Way("ZeroMQ", client), Way("HTTP gateway", http_client)
        yield Gateway(daemon, web.status, web.process.pid, direct, by_http)


def measure_gateway(model: str, prompts: Prompts, gateway: Gateway, repeats: int) -> Iterator[Figure]:
    """The figures of one model, as they come; raises GatewayLeaks."""
    named = partial(figure, f"gateway {model}")
    cpu = _cpu_seconds(gateway.pid)
    runs = take_turns(
        [gateway.direct, gateway.by_http], lambda: Workload(prompts.take(STREAMS, PROMPT), OUTPUT), repeats
    )
    cpu = _cpu_seconds(gateway.pid) - cpu
    direct, through = runs[gateway.direct.name], runs[gateway.by_http.name]
    rates = [[throughput(run) for run in system] for system in (through, direct)]
    name = f"{STREAMS} streams"
    yield named(name, "tok/s", rates[0], others={gateway.direct.name: rates[1]})
    yield named(f"{name}, of ZeroMQ's", "%", [100 * http / zeromq for http, zeromq in zip(*rates, strict=True)])
    added = [_ttft(http) - _ttft(zeromq) for http, zeromq in zip(through, direct, strict=True)]
    yield named(f"{name}, added TTFT p50", "ms", added, more_is_better=False)
    tokens = sum(timeline.tokens for run in through for timeline in run)
    yield named("the gateway's CPU", "us/tok", [MICROSECONDS * cpu / tokens], more_is_better=False)
    added = [_added_alone(prompts, gateway) for _ in range(repeats)]
    yield named("alone, added TTFT p50", "ms", added, more_is_better=False)
    yield named(f"{IDLE} idle streams", "MB", [_memory_of_idle_streams(gateway)], more_is_better=False)
    yield from _disconnects(named, prompts, gateway)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _ttft(timelines: list[Timeline]) -> float:
    return percentile(ttfts(timelines), 50)


def _added_alone(prompts: Prompts, gateway: Gateway) -> float:
    """By turns, and so that both have the machine as it is."""
    through, direct = [], []
    for _ in range(ALONE):
        for system, timelines in ((gateway.direct, direct), (gateway.by_http, through)):
            timelines += timelines_of(system, Workload(prompts.take(1, PROMPT), 1))
    return _ttft(through) - _ttft(direct)


def _memory_of_idle_streams(gateway: Gateway) -> float:
    """What the gateway grows by, while the daemon is stopped and so says nothing."""
    before = Footprint.of(gateway.pid)
    os.kill(gateway.daemon.pid, signal.SIGSTOP)
    try:
        grown = asyncio.run(_grown(gateway, before))
    finally:
        os.kill(gateway.daemon.pid, signal.SIGCONT)
    _wait_until_nothing_is_left(gateway, before)
    return grown


async def _grown(gateway: Gateway, before: Footprint) -> float:
    spoken: set[int] = set()
    everybody = asyncio.Event()

    def hear(number: int, event: bytes) -> None:
        assert event.startswith(b":"), event
        spoken.add(number)
        if len(spoken) == IDLE:
            everybody.set()

    body = {"prompt": "Once upon a time", "stream": True}
    readers = [await post(gateway.url, body, partial(hear, number)) for number in range(IDLE)]
    await asyncio.wait_for(everybody.wait(), PATIENCE)  # a comment on each: it is a stream by now
    grown = Footprint.of(gateway.pid).megabytes - before.megabytes
    for reader in readers:
        reader.transport.abort()
    await asyncio.gather(*(reader.ended for reader in readers), return_exceptions=True)
    return grown


def _disconnects(named: Callable[..., Figure], prompts: Prompts, gateway: Gateway) -> Iterator[Figure]:
    before = Footprint.of(gateway.pid)
    hung_up = asyncio.run(disconnect_at_random(gateway.url, prompts, DISCONNECTS))
    left = time.monotonic()
    after = _wait_until_nothing_is_left(gateway, before)
    yield named(f"{DISCONNECTS:,} requests, hung up on", "", [hung_up])
    yield named("until none is left of them", "s", [time.monotonic() - left], more_is_better=False)
    yield named("files that they leave open", "", [max(0, after.files - before.files)], more_is_better=False)


async def disconnect_at_random(url: str, prompts: Prompts, count: int) -> int:
    """Ask so many things, whole and streamed, and hang up on most: at once, after some events or a moment; how many."""
    rng, turns = np.random.default_rng(0), asyncio.Semaphore(AT_ONCE)

    async def ask() -> bool:
        async with turns:
            length, max_tokens, patience = (int(number) for number in rng.integers(1, 64, 3))
            body = {"prompt": prompts.take(1, length)[0], "max_tokens": max_tokens, "ignore_eos": True}
            return await _ask(url, body | {"stream": bool(rng.random() < 0.7), "n": int(rng.integers(1, 4))}, patience)

    return sum(await asyncio.gather(*(ask() for _ in range(count))))


async def _ask(url: str, body: dict[str, object], patience: int) -> bool:
    """Hear that many events, or wait that many milliseconds; whether it was hung up on."""
    heard = asyncio.Semaphore(0)
    reader = await post(url, body, lambda _: heard.release())
    if body["stream"]:
        for _ in range(patience):
            waiting = asyncio.ensure_future(heard.acquire())
            await asyncio.wait((waiting, reader.ended), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    else:
        await asyncio.wait((reader.ended,), timeout=patience / MILLISECONDS)
    hung_up = not reader.ended.done()
    reader.transport.abort()
    if not hung_up and (error := reader.ended.exception()):
        raise error
    if hung_up:
        await asyncio.gather(reader.ended, return_exceptions=True)
    return hung_up


def _wait_until_nothing_is_left(gateway: Gateway, before: Footprint) -> Footprint:
    """The gateway's footprint then; raises GatewayLeaks if that does not come."""
    deadline = time.monotonic() + PATIENCE
    with gateway.daemon.client() as client:
        while True:
            left, footprint = _left(client), Footprint.of(gateway.pid)
            if not any(left.values()) and footprint.files <= before.files:
                return footprint
            if time.monotonic() > deadline:
                raise GatewayLeaks(f"left behind: {left}, {footprint.files - before.files} files of the gateway")
            time.sleep(0.05)


def _left(client: Client) -> dict[str, int]:
    status = client.status()
    return {name: int(status[name]) for name in ("running", "waiting", "open_requests", "pages_owned")}
