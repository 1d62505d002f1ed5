"""The driver and the engine together: requests with adapters that are loaded again, unloaded and evicted meanwhile."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapter_engines import AdapterEngines, adapter_engines
from fakes import FakeTokenizer
from test_adapters import load, unload
from test_driver import Listener

from driver.errors import NotFound
from driver.odriver import oDriver
from driver.request import ActiveRequest
from engine.hub.roots import Root

COUNT = 40
"""Requests of each of four clients."""


def name_of(adapter: str) -> str:
    """What requests call it."""
    return adapter.replace(" ", "-")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> AdapterEngines:
    """Two slots for more adapters than that, whose directories are below one root."""
    return adapter_engines(tmp_path_factory.mktemp("adapters"), "llama2")


@pytest.mark.thorough
def test_each_request_gets_torchs_tokens_while_adapters_come_and_go(compiled: AdapterEngines) -> None:
    """Or is told that its adapter is not there; in the end the engine has no more of them than the driver."""
    engine = compiled.engine()
    root = Path(next(iter(compiled.directories.values()))).parent
    paths = {name_of(name): directory.name for name, directory in compiled.directories.items()}
    names = sorted(paths)
    driver = oDriver(
        engine,
        FakeTokenizer(),
        model_names=["base"],
        max_cpu_loras=4 * len(names),
        adapter_root=Root(str(root), "adapter_root"),
    )
    driver.start()

    def ask(client: int) -> int:
        draw, served = random.Random(client), 0
        for number in range(COUNT):
            case: dict[str, Any] = draw.choice(compiled.cases)
            params = {"temperature": 0, "max_tokens": len(case["tokens"]), "ignore_eos": True}
            channel = Listener()
            try:
                driver.submit_request(
                    ActiveRequest(
                        request_id=f"{client}-{number}",
                        channel=channel,
                        prompt=case["prompt"],
                        params=params,
                        client=str(client),
                        model=name_of(case["adapter"]),
                    )
                )
            except NotFound:
                assert case["adapter"]
                continue
            samples = list(channel)
            assert samples[-1].error is None
            assert [token_id for sample in samples for token_id in sample.token_ids] == case["tokens"]
            served += 1
        return served

    try:
        for name in names:
            load(driver, name, path=paths[name])
        with ThreadPoolExecutor(4) as threads:
            clients = [threads.submit(ask, client) for client in range(4)]
            draw = random.Random(0)
            while not all(one.done() for one in clients):
                name = draw.choice(names)
                if draw.random() < 0.2:
                    unload(driver, name)
                load(driver, name, path=paths[name])
            served = [one.result() for one in clients]
        assert min(served) > 0
        for name in names:
            unload(driver, name)
        driver.operations.reset_prefix_cache("r", emptied := Listener())
        list(emptied)
    finally:
        driver.stop("the test is over")

    assert not engine._scheduler.adapters._known and engine.stats().adapter_loads > len(names)
