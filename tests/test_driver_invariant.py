"""Every submitted request gets exactly one last sample, whatever happens."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from test_driver_end import FaultyTokenizer

from driver.errors import DriverError
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample

Action = tuple[Any, ...]
PROMPTS = ["a", "abc", "é😀", "stop here", "", "break encode", "break decode"]
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("xyz"), st.sampled_from(PROMPTS[:5]), st.integers(-1, 30)),
    st.tuples(st.just("abort"), st.sampled_from("xyz")),
    st.tuples(st.just("step"), st.integers(1, 5)),
)
FAULTS = st.one_of(
    st.tuples(st.just("submit"), st.just("fault"), st.sampled_from(PROMPTS[5:]), st.just(30)),
    st.tuples(st.just("stop")),
)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Deaths by the hundred need no tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class RecordingChannel:
    """Keeps everything it is given."""

    def __init__(self) -> None:
        self.samples: list[ReturnSample] = []
        self.ended = threading.Event()

    def put(self, sample: ReturnSample) -> None:
        self.samples.append(sample)
        if sample.is_last:
            self.ended.set()


class Client:
    """Plays a script on a thread of its own, and keeps the channels of the requests that were accepted or refused."""

    def __init__(self, driver: oDriver, gate: threading.Semaphore, script: list[Action]) -> None:
        self.driver, self.gate, self.script = driver, gate, script
        self.accepted: list[RecordingChannel] = []
        self.refused: list[RecordingChannel] = []
        self.thread = threading.Thread(target=self.play)

    def play(self) -> None:
        for action, *arguments in self.script:
            getattr(self, action)(*arguments)

    def submit(self, request_id: str, prompt: str, max_tokens: int) -> None:
        channel = RecordingChannel()
        params = {"max_tokens": max_tokens, "stop": ["p h"]}
        try:
            self.driver.submit_request(
                ActiveRequest(request_id=request_id, channel=channel, prompt=prompt, params=params)
            )
            self.accepted.append(channel)
        except DriverError:
            self.refused.append(channel)

    def abort(self, request_id: str) -> None:
        self.driver.abort(request_id)

    def step(self, times: int) -> None:
        self.gate.release(times)

    def stop(self) -> None:
        threading.Thread(target=self.driver.stop, args=["enough"]).start()


@given(
    scripts=st.lists(st.lists(ACTIONS, max_size=15), min_size=1, max_size=3),
    fault=st.none() | FAULTS,
    fails_at=st.none() | st.integers(1, 20),
    stops=st.booleans(),
    max_queued=st.integers(1, 6),
)
def test_every_accepted_request_has_one_end_and_every_refused_one_none(
    scripts: list[list[Action]],
    fault: Action | None,
    fails_at: int | None,
    stops: bool,
    max_queued: int,
) -> None:
    """Several clients submit and abort under the same ids while stages break and the driver is stopped: a request that
    was accepted gets exactly one last sample, and nothing after it; one that was refused gets nothing at all."""
    gate = threading.Semaphore(0)
    driver = oDriver(
        FakeEngine(gate=gate, fails_at=fails_at, max_num_seqs=2), FaultyTokenizer(), max_queued_requests=max_queued
    )
    driver.start()
    clients = [Client(driver, gate, script) for script in scripts]
    clients[0].script.extend([fault] if fault else [])

    for client in clients:
        client.thread.start()
    for client in clients:
        client.thread.join()
    gate.release(10_000)
    if not stops:
        for channel in [channel for client in clients for channel in client.accepted]:
            assert channel.ended.wait(timeout=PATIENCE)
    driver.stop("the test is over")

    for channel in [channel for client in clients for channel in client.accepted]:
        assert Counter(sample.is_last for sample in channel.samples)[True] == 1
        assert channel.samples[-1].is_last
    assert all(channel.samples == [] for client in clients for channel in client.refused)
    assert driver.status().open_requests == 0
