"""scripts/bench gateway: the client over HTTP that it measures with."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fake_driver import FakeDriver
from gateways import gateway

from driver.errors import Overloaded
from scripts.benchmarks.clients.http_client import run
from scripts.benchmarks.clients.workload import Workload

pytestmark = pytest.mark.thorough

WORKLOAD = Workload([[5, 6], [7]], max_tokens=4)


@pytest.fixture
def url(address: str, driver: FakeDriver) -> Iterator[str]:
    """Where the gateway under test is."""
    del driver
    with gateway(address) as http:
        yield str(http.base_url)


def answer(driver: FakeDriver) -> None:
    """Two requests, each with four tokens of which three have a text."""
    for _ in WORKLOAD.prompts:
        request = driver.take()
        for text in ("so", "", " far", " on"):
            driver.say(request, text, [1])
        driver.finish(request, "length", 4)


def test_every_token_counts(url: str, driver: FakeDriver) -> None:
    """Those without a text as well, though they are no arrival of their own."""
    threading.Thread(target=answer, args=(driver,)).start()

    timelines = asyncio.run(run(url, WORKLOAD))

    assert [(one.prompt_tokens, one.tokens, one.error) for one in timelines] == [(2, 4, None), (1, 4, None)]
    assert all(len(one.arrivals) <= 3 and one.sent_at < one.first_at <= one.last_at for one in timelines)


def test_a_refusal_is_the_error_of_its_request(url: str, driver: FakeDriver) -> None:
    """In the gateway's own words."""
    driver.refusal = Overloaded("too many wait", 2)

    timelines = asyncio.run(run(url, WORKLOAD))

    assert all("too many wait" in str(one.error) and not one.arrivals for one in timelines)
