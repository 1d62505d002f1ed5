"""The AsyncClient against a server in this process, over real sockets."""

import asyncio
import gc
import inspect
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_driver import PATIENCE, FakeDriver, serving

from driver.errors import Overloaded
from driver.request import ActiveRequest, Usage
from ipc.async_client import AsyncClient, AsyncStream
from ipc.client import Client, Stream
from ipc.errors import ConnectFailed, ConnectionLost, RequestFailed
from ipc.wire.completion import Piece


def run(address: str, use: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """What becomes of using a client of that address, in a loop of its own."""

    async def main() -> Any:
        async with AsyncClient(address) as client:
            return await asyncio.wait_for(use(client), PATIENCE)

    return asyncio.run(main())


async def taken(driver: FakeDriver) -> ActiveRequest:
    """The next request that is held open."""
    return await asyncio.to_thread(driver.take)


async def aborted(driver: FakeDriver) -> str:
    """The id of the next request to be aborted."""
    return await asyncio.to_thread(driver.aborted.get, timeout=PATIENCE)


def surface(of: type) -> dict[str, list[tuple[Any, ...]]]:
    """The public methods of a class, and the one that makes it, with names, kinds and defaults of parameters."""
    members = {name: member for name, member in vars(of).items() if name == "__init__" or not name.startswith("_")}
    return {
        name: [(at.name, at.kind, at.default) for at in inspect.signature(member).parameters.values()]
        if callable(member)
        else []
        for name, member in members.items()
    }


def test_both_clients_have_the_same_surface() -> None:
    """Whoever knows one knows the other: the same names, parameters and defaults."""
    assert surface(AsyncClient) == surface(Client)
    assert surface(AsyncStream).keys() == surface(Stream).keys()


@pytest.mark.usefixtures("driver")
def test_pieces_are_iterated_over(address: str) -> None:
    """Those of a text and of a chat; usage and reason come with the last."""

    async def use(client: AsyncClient) -> tuple[list[Piece], str]:
        pieces = [piece async for piece in client.generate("once upon a time")]
        chat = [piece.text async for piece in client.chat([{"role": "user", "content": "What is it?"}])]
        return pieces, "".join(chat)

    pieces, chat = run(address, use)

    assert "".join(piece.text for piece in pieces) == "onceuponatime" and chat == "Whatisit?"
    assert (pieces[-1].finish_reason, pieces[-1].usage) == ("stop", Usage(1, 4))


@pytest.mark.usefixtures("driver")
def test_many_tasks_share_a_client(address: str) -> None:
    """Each gets its own answers, whatever the others do, and the daemon's numbers are there for all."""
    prompts = [f"task {number} says {'x' * number}" for number in range(200)]

    async def use(client: AsyncClient) -> tuple[list[Any], dict[str, Any]]:
        return await asyncio.gather(*map(client.complete, prompts)), await client.status()

    wholes, status = run(address, use)

    assert [whole.text for whole in wholes] == [prompt.replace(" ", "") for prompt in prompts]
    assert status == {
        "model": "parrot",
        "clients": 1,
        "open_requests": 0,
        "state": "serving",
        "seconds_since_progress": 0.0,
        "weight_version": 1,
        "stages": {"prepare": 0.0, "execution": 0.0, "sockets": 0.0, "control": 0.0},
    }


@pytest.mark.usefixtures("driver")
def test_loops_of_several_threads_share_a_client(address: str) -> None:
    """And one after the other: the client belongs to none of them."""
    client = AsyncClient(address)

    async def ask(prompt: str) -> str:
        return (await client.complete(prompt)).text

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: asyncio.run(ask(f"loop {number}")), range(40)))
    assert len(client._loop_queues) <= 9, "loops that have ended are kept"
    asyncio.run(client.close())

    assert texts == [f"loop{number}" for number in range(40)]


def test_pieces_come_as_they_are_made(driver: FakeDriver, address: str) -> None:
    """A piece can be read before the next one exists, from a request that began when it was made."""

    async def use(client: AsyncClient) -> None:
        stream = client.generate([1])
        request = await taken(driver)
        for text in ("first", "second"):
            driver.say(request, text, [1])
            assert await anext(stream) == Piece(text, [1])
        driver.finish(request, "length", num_tokens=2)
        assert [piece async for piece in stream] == [Piece("", [], "length", Usage(1, 2))]
        assert [piece async for piece in stream] == []

    run(address, use)


@pytest.mark.parametrize("ask", ["generate", "complete"])
def test_cancelling_a_task_aborts_its_request(driver: FakeDriver, address: str, ask: str) -> None:
    """The daemon stops working on it, and on nothing else."""

    async def wait(client: AsyncClient) -> None:
        if ask == "complete":
            await client.complete([1])
        async for _ in client.generate([1]):
            pass

    async def use(client: AsyncClient) -> None:
        other = client.generate([2])
        await taken(driver)
        task = asyncio.create_task(wait(client))
        request = await taken(driver)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await aborted(driver) == request.request_id
        assert driver.aborted.empty()
        await other.close()

    run(address, use)


@pytest.mark.parametrize("leave", ["break", "raise", "drop", "close"])
def test_leaving_early_aborts(driver: FakeDriver, address: str, leave: str) -> None:
    """By whatever way out of the loop, or without ever entering it; the other way a stream ends for good."""

    async def read(stream: AsyncStream) -> None:
        async for _ in stream:
            if leave == "raise":
                raise ValueError("a mistake of the caller's")
            break

    async def use(client: AsyncClient) -> None:
        stream = client.generate([1])
        request = await taken(driver)
        driver.say(request, "enough", [1])
        if leave == "close":
            await stream.close()
            assert [piece async for piece in stream] == []
        elif leave != "drop":
            await asyncio.gather(read(stream), return_exceptions=True)
        del stream
        gc.collect()
        assert await aborted(driver) == request.request_id

    run(address, use)


def test_what_is_refused_is_raised_where_it_is_awaited(driver: FakeDriver, address: str) -> None:
    """With the daemon's code; the client can be used again."""

    async def use(client: AsyncClient) -> str:
        driver.refusal = Overloaded("too many wait")
        with pytest.raises(RequestFailed, match="too many wait") as failure:
            await client.complete("x")
        assert failure.value.code == "overloaded"
        driver.refusal = None
        return (await client.complete("again")).text

    assert run(address, use) == "again"


def test_without_a_daemon_connecting_fails_in_words(address: str) -> None:
    """On entering, or with the first request; before that nothing is known of a daemon."""

    async def use() -> None:
        client = AsyncClient(address, timeout=0.1)
        with pytest.raises(ConnectFailed, match="has not been connected"):
            _ = client.welcome
        with pytest.raises(ConnectFailed, match="no daemon answers"):
            await client.complete("x")
        with pytest.raises(ConnectFailed, match="no daemon answers"):
            async with client:
                pass

    asyncio.run(use())


def test_connecting_again_finds_who_is_there(address: str) -> None:
    """As long as a daemon stays it says the same, and the next one speaks for itself."""

    async def use() -> None:
        client = AsyncClient(address, PATIENCE)
        for model in ("parrot", "owl"):
            with serving(address, FakeDriver(), model=model):
                welcome = await client.connect()
                assert welcome.model == model and await client.connect() is welcome
            while client._connection.is_up:  # until it has noticed
                await asyncio.sleep(0)
        await client.close()

    asyncio.run(asyncio.wait_for(use(), PATIENCE))


def test_a_daemon_that_goes_away_fails_what_is_open(address: str) -> None:
    """And the next request finds the next daemon."""

    async def use() -> None:
        client, driver = AsyncClient(address), FakeDriver()
        with serving(address, driver):
            stream = client.generate([1])
            await taken(driver)
        with pytest.raises(ConnectionLost, match="went away"):
            await anext(stream)
        with serving(address, FakeDriver()):
            assert (await client.complete("again")).text == "again"
        await client.close()

    asyncio.run(use())


@pytest.mark.usefixtures("driver")
def test_another_process_is_told_to_make_its_own_client(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a forked child is; no await waits for what only the parent gets."""

    async def use(client: AsyncClient) -> None:
        stream = client.generate("hold")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            for awaited in (anext(stream), client.connect(), client.complete("x")):
                with pytest.raises(ConnectionLost, match="forked"):
                    await awaited

    run(address, use)
