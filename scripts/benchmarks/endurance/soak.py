"""Ten thousand requests of fifty clients on a pool that holds a quarter of what they want, while things go wrong.

One request in five is aborted, some have little time, client processes are killed and steps of the device fail. All the
same every request ends once, with a reason; an answer that came whole is the one that the same request gets alone; and
when all is quiet the daemon holds what it held after the first part of the load.
"""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from random import Random
from threading import Timer
from types import TracebackType
from typing import Self

from engine.hub.names import DEMO_MODEL
from ipc.client import Client
from scripts.benchmarks.endurance.soak_client import ask_one
from scripts.benchmarks.endurance.soak_requests import Ask, Choice, Ending, greedy_cases, pages_of, random_asks
from scripts.benchmarks.figures.figure import Figure, MeasurementFailed, figure
from scripts.benchmarks.histories.scheduler_history import SchedulerHistory
from scripts.benchmarks.processes.child import Child, ChildFailed
from scripts.benchmarks.processes.daemon import Daemon
from scripts.benchmarks.processes.faulty_daemon import faulty_daemon
from scripts.benchmarks.processes.footprint import Footprint

CLIENT = "scripts.benchmarks.endurance.soak_client"
REQUESTS, CLIENTS, PROCESSES = 10_000, 50, 5
BATCH = 10
"""Requests that each client of a process is given at a time."""
MINUTE = 60.0
"""Seconds of load after which the daemon's footprint is taken the first time, if half of the requests last that long."""
KILLS, KILL_AFTER = 5, 0.5
"""Client processes that are killed, and how many seconds after they have begun to ask."""
WHOLE = ("stop", "length")
PAGE_SIZE = 16
SETTINGS: tuple[str, ...] = ()
"""More of the daemon's."""
FAULT_EVERY = 1000
"""Steps of which one fails."""
QUIET_TIMEOUT = 60.0
"""Seconds until the daemon has noticed whom it lost: twice what makes a silent client a lost one."""
MORE_MEMORY = 0.05
"""Share by which resident memory may differ: malloc keeps what other threads may want again, and does not say."""
MORE_THREADS = MORE_FILES = 0
HISTORY_STEPS, HISTORY_LENGTH = 1_000_000, 200


class SoakFailed(MeasurementFailed):
    """Something that must not happen, did."""


def measure_soak(
    requests: int, clients: int = CLIENTS, processes: int = PROCESSES, kills: int = KILLS
) -> Iterator[Figure]:
    """What was shown, as figures; raises SoakFailed where it was not."""
    cases = greedy_cases()
    asks = random_asks(cases, requests, seed=0)
    wanted = [pages_of(ask, PAGE_SIZE) for ask in asks]
    pages = 1 + max(round(clients * sum(wanted) / len(wanted) / 4), *wanted)
    settings = ("--num-pages", str(pages), "--page-size", str(PAGE_SIZE), *SETTINGS)
    program = faulty_daemon(FAULT_EVERY)
    with Daemon(DEMO_MODEL, *settings, program=program) as daemon, daemon.client() as control:
        alone = [_alone(control, case) for case in cases]
        with Soak(daemon, control, clients // processes, processes) as soak:
            began, asked = time.monotonic(), 0
            while asked < requests // 2 and time.monotonic() < began + MINUTE:
                soak.play(asks[asked : asked + clients * BATCH], 0)
                asked += clients * BATCH
            before, quiet_at = soak.rest(), time.monotonic()
            soak.play(asks[asked:], kills)
            seconds = time.monotonic() - began
            after = soak.rest()
        yield figure("soak", f"requests of {clients} clients, on {pages} pages", "", [requests])
        yield figure("soak", "their rate", "req/s", [requests / seconds])
        yield from _endings(soak, requests)
        yield from _comparisons(soak, alone)
        yield from _faults(control.status())
        yield from _footprints(before, after, quiet_at - began)


class Soak:
    """The clients' side, from entering to leaving, and what became of their requests."""

    def __init__(self, daemon: Daemon, control: Client, clients: int, processes: int) -> None:
        self.answered: list[tuple[Ask, Ending]] = []
        self.killed = 0
        """Requests of clients that were killed, as far as nobody has heard how they ended."""
        self._daemon = daemon
        self._control = control
        self._clients = clients
        """Of each process."""
        self._processes = processes
        self._random = Random(0)
        self._children: list[Child] = []
        self._free: SimpleQueue[Child] = SimpleQueue()
        """Those that ask nothing at the moment."""

    def __enter__(self) -> Self:
        for _ in range(self._processes):
            self._free.put(self._child())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self._children:
            child.__exit__(kind, error, at)

    def play(self, asks: list[Ask], kills: int) -> None:
        """Have all processes ask all of this; so many of them are killed meanwhile, and followed by others."""
        size = BATCH * self._clients
        batches = [asks[start : start + size] for start in range(0, len(asks), size)]
        deadly = set(self._random.sample(range(len(batches)), kills))
        with ThreadPoolExecutor(self._processes) as threads:
            list(threads.map(self._ask, batches, [number in deadly for number in range(len(batches))]))

    def rest(self) -> Footprint:
        """Wait until the daemon has nothing left to do, and knows whom it has lost; what it holds then."""
        deadline = time.monotonic() + QUIET_TIMEOUT
        while left := self._left():
            if time.monotonic() > deadline:
                raise SoakFailed(f"{QUIET_TIMEOUT:g} s after the last request the daemon still has {left}")
            time.sleep(0.5)
        return Footprint.of(self._daemon.pid)

    def _left(self) -> dict[str, int]:
        """What of a daemon at rest should not be there."""
        status = self._control.status()
        left = {
            name: status[name] for name in ("running", "waiting", "queued_requests", "open_requests", "pages_owned")
        }
        left["clients lost"] = status["clients"] - 1 - self._clients * self._processes
        left["pages lost"] = status["pages_total"] - status["pages_free"] - status["pages_cached"]
        return {name: count for name, count in left.items() if count}

    def _ask(self, batch: list[Ask], deadly: bool) -> None:
        """Have a process that is free ask all of this; it may not live to tell."""
        child = self._free.get()
        question = [batch[number :: self._clients] for number in range(self._clients)]
        killer = Timer(KILL_AFTER, child.kill)
        if deadly:
            killer.start()
        try:
            endings = child.ask(question, list[list[Ending]])
            for asks, ended in zip(question, endings, strict=True):
                self.answered += zip(asks, ended, strict=True)
        except ChildFailed:
            if not deadly:
                raise
            self.killed += len(batch)
            self._children.remove(child)
            child.__exit__(None, None, None)
            child = self._child()
        finally:
            killer.cancel()
            self._free.put(child)

    def _child(self) -> Child:
        child = Child(CLIENT, self._daemon.address, str(self._clients)).__enter__()
        self._children.append(child)
        return child


def check_histories(steps: int = HISTORY_STEPS) -> Iterator[Figure]:
    """Random histories of the scheduler alone, under its model checker, of so many steps together."""
    began = time.monotonic()
    for seed in range(steps // HISTORY_LENGTH):
        history = SchedulerHistory(Random(seed))
        try:
            for _ in range(HISTORY_LENGTH):
                history.step()
            history.end()
        except AssertionError as broken:
            raise SoakFailed(f"a random history of the scheduler, of seed {seed}: {broken}") from broken
    yield figure("soak", "random steps of the scheduler, checked", "", [steps])
    yield figure("soak", "time for them", "s", [time.monotonic() - began], more_is_better=False)


def _alone(client: Client, case: Ask) -> Ending:
    """How a request ends when nobody else asks; a step of it may fail, even twice."""
    for _ in range(3):
        ending = ask_one(client, case)
        if ending.error is None and ending.wrong is None:
            return ending
    raise SoakFailed(f"alone, {case} ends with {ending.error or ending.wrong} each time")


def _endings(soak: Soak, requests: int) -> Iterator[Figure]:
    if len(soak.answered) + soak.killed != requests:
        raise SoakFailed(f"of {requests} requests {len(soak.answered)} ended, and {soak.killed} were killed")
    wrong = [ending.wrong for _, ending in soak.answered if ending.wrong is not None]
    if wrong:
        raise SoakFailed(f"{len(wrong)} requests did not end as they should, the first so: {wrong[0]}")
    reasons = Counter(ending.reason for _, ending in soak.answered)
    for reason, count in reasons.most_common():
        yield figure("soak", f"ended with {reason}", "", [count])
    yield figure("soak", "of clients that were killed", "", [soak.killed])


def _comparisons(soak: Soak, alone: list[Ending]) -> Iterator[Figure]:
    whole = 0
    for ask, ending in soak.answered:
        if ask.case is None:
            continue
        for index, choice in ending.choices.items():
            wanted = alone[ask.case].choices[index]
            if choice.finish_reason in WHOLE:
                whole += 1
            if not agrees(choice, wanted):
                raise SoakFailed(f"alone, {ask} gives {wanted}; under load it gave {choice}")
    yield figure("soak", "whole greedy samples, all equal to those alone", "", [whole])


def agrees(choice: Choice, alone: Choice) -> bool:
    """Whether a greedy sample is the one that was computed alone, or its beginning where it was cut off."""
    if choice.finish_reason in WHOLE:
        return choice == alone
    length = len(choice.token_ids)
    return choice.token_ids == alone.token_ids[:length] and alone.text.startswith(choice.text)


def _faults(status: dict[str, float]) -> Iterator[Figure]:
    for name in ("failed_steps", "failed_rows", "preemptions", "steps"):
        yield figure("soak", name.replace("_", " "), "", [status[name]], more_is_better=False)


def _footprints(before: Footprint, after: Footprint, seconds: float) -> Iterator[Figure]:
    """Those at rest after the first part, and at rest after all of it, with as many clients connected."""
    for name in ("threads", "files", "megabytes"):
        held, then = getattr(after, name), getattr(before, name)
        yield figure("soak", f"{name} at rest", "", [held], more_is_better=False, others={f"{seconds:.0f} s": [then]})
    if after.threads > before.threads + MORE_THREADS or after.files > before.files + MORE_FILES:
        raise SoakFailed(f"the daemon holds more than before: {after} after {before}")
    if after.megabytes > before.megabytes * (1 + MORE_MEMORY):
        raise SoakFailed(f"the daemon's memory grew from {before.megabytes:.0f} to {after.megabytes:.0f} MB")
