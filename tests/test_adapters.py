"""Adapters in the driver: which version a request gets, and what becomes of it, on an engine that knows its adapters."""

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapter_files import ADAPTERS, AdapterKind, write_adapter
from fake_driver import serving
from fakes import FakeEngine, FakeTokenizer
from test_driver import Listener, error_of, submit, text_of

import engine.build
from driver.adapters.commands import LoadAdapter, UnloadAdapter
from driver.errors import Draining, InvalidRequest, NotFound, Overloaded
from driver.odriver import oDriver
from engine.adapters.adapter import Adapter
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.hub.names import DEMO_MODEL
from engine.hub.roots import Root
from engine.scheduling.sequence import Sequence, SequenceOutput
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.service import start_up

NAMES = ("alice", "bob", "carol", "bad")
RACERS = tuple(f"name{number}" for number in range(4))
NUM_TOLD = 16
"""Tokens that have a name and a version at least."""
LEAST = 50
"""Requests of each client that are served while adapters come and go, or after."""
LONG = {"max_tokens": 100}


class SlowReader(FakeEngine):
    """Reads no adapter before ``may_read`` is set; ``reads`` says when it has begun to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reads, self.may_read = threading.Semaphore(0), threading.Event()
        self.may_read.set()

    def read_adapter(self, directory: str) -> Adapter:
        self.reads.release()
        assert self.may_read.wait(30)
        return super().read_adapter(directory)


class HeldEngine(FakeEngine):
    """Adapters come and go, and no request gets a token before ``may_step`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Event()

    def step(self) -> list[SequenceOutput]:
        return super().step() if self.may_step.wait(0.01) else []


class TellingEngine(FakeEngine):
    """Writes the name of a request's adapter, as its directory has it, and the version, over and over."""

    def _next_tokens(self, sequence: Sequence) -> list[int]:
        position = len(sequence.output_token_ids) + sequence.num_in_flight
        adapter = self.adapters.get(sequence.adapter_id)
        told = f"{Path(adapter.origin).name} {adapter.uid}; " if adapter is not None else "nobody; "
        return [told.encode()[position % len(told)]]


@contextmanager
def build(root: Path, engine: FakeEngine | None = None, max_cpu_loras: int = 4) -> Iterator[oDriver]:
    """A started driver that reads adapters below this directory, where there are NAMES."""
    for name in NAMES:
        (root / name).mkdir(exist_ok=True)
    driver = oDriver(
        engine or FakeEngine(),
        FakeTokenizer(),
        model_names=["base", "alias"],
        max_cpu_loras=max_cpu_loras,
        adapter_root=Root(str(root), "adapter_root"),
    )
    driver.start()
    try:
        yield driver
    finally:
        driver.stop("the test is over")


def begin(driver: oDriver, kind: Callable[..., Any], name: str, **fields: Any) -> Listener:
    """The channel of a command."""
    channel = Listener()
    driver.operations.command_adapters(kind("command", channel, name, **fields))
    return channel


def load(driver: oDriver, name: str, **fields: Any) -> str:
    """What an operator is told."""
    return text_of(list(begin(driver, LoadAdapter, name, **fields)))


def unload(driver: oDriver, name: str) -> str:
    """The same."""
    return text_of(list(begin(driver, UnloadAdapter, name)))


def listed(driver: oDriver) -> dict[str, tuple[int, int]]:
    """Version and open requests of each adapter."""
    return {row.name: (row.version, row.open_requests) for row in driver.adapters.rows()}


def test_a_request_gets_the_adapter_that_it_names(tmp_path: Path) -> None:
    """The model itself has two names, and none is its, too; an adapter's pages are not the model's."""
    engine = FakeEngine()
    engine.limits = msgspec.structs.replace(engine.limits, page_size=16)
    with build(tmp_path, engine) as driver:
        told = [load(driver, "alice"), load(driver, "bob", path="alice")]
        for number, model in enumerate(("", "base", "alias", "alice", "bob")):
            text_of(list(submit(driver, str(number), model=model)))

    assert told == [
        "the adapter alice is loaded: version 1, of rank 1",
        "the adapter bob is loaded: version 2, of rank 1",
    ]
    assert [sequence.adapter_id for sequence in engine.admitted] == [0, 0, 0, 1, 2]
    assert len({sequence.salt for sequence in engine.admitted}) == 3


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    """With the names of what is, as far as the client may use it; tokenizers are asked by name, too."""
    with build(tmp_path) as driver:
        load(driver, "alice")
        load(driver, "bob")
        for name, allowed, names in (
            ("carol", None, "are base, alias, alice, bob"),
            ("bob", {"alice"}, "are base, alias, alice"),
            ("bob", (), "are base, alias"),
        ):
            with pytest.raises(NotFound, match=f"no model or adapter '{name}' is served here: there {names}$"):
                submit(driver, model=name, adapters=allowed)
        text_of(list(submit(driver, model="alice", adapters={"alice"})))
        assert [row.name for row in driver.adapters.rows({"bob", "carol"})] == ["bob"]
        assert driver.request_log.failed["not_found"] == 3


def test_an_adapter_loaded_again_is_another_version(tmp_path: Path) -> None:
    """Open requests keep theirs, which goes with the last of them; the next ones get the new one."""
    engine = HeldEngine()
    with build(tmp_path, engine) as driver:
        load(driver, "alice")
        old = [submit(driver, str(number), model="alice", params=LONG) for number in range(2)]
        load(driver, "alice")
        new = submit(driver, "new", model="alice")
        assert listed(driver) == {"alice": (2, 1)} and set(engine.adapters) == {1, 2}
        engine.may_step.set()
        for channel in (*old, new):
            text_of(list(channel))
        load(driver, "bob")  # behind the removal of what nobody has

        assert set(engine.adapters) == {2, 3}
        assert [sequence.adapter_id for sequence in engine.admitted] == [1, 1, 2]


def test_requests_outlive_the_name_of_their_adapter(tmp_path: Path) -> None:
    """What is unloaded takes no more of them, whether pinned or not; its memory is free when the last has ended."""
    engine = HeldEngine()
    with build(tmp_path, engine) as driver:
        load(driver, "alice", pin=True)
        channel = submit(driver, model="alice", params=LONG)

        assert unload(driver, "alice") == "the adapter alice is unloaded; 1 open requests go on with it"
        with pytest.raises(NotFound):
            submit(driver, "b", model="alice")
        assert error_of(begin(driver, UnloadAdapter, "alice"))[0] == "not_found"
        assert set(engine.adapters) == {1}
        load(driver, "alice")
        engine.may_step.set()
        assert len(text_of(list(channel))) == 100
        load(driver, "bob")
        assert set(engine.adapters) == {2, 3}


def test_every_way_to_end_gives_an_adapter_back(tmp_path: Path) -> None:
    """A refusal, an abort of what is queued or runs, a mistake of the client's, and an error."""
    engine = HeldEngine()
    with build(tmp_path, engine) as driver:
        load(driver, "alice")
        running = submit(driver, "running", model="alice", params=LONG)
        with pytest.raises(Exception, match="in use"):
            submit(driver, "running", model="alice")
        assert error_of(submit(driver, "wrong", model="alice", params={"max_tokens": -1}))[0] == "invalid_request"
        driver.abort("running")
        engine.may_step.set()
        assert list(running)[-1].finish_reason == "abort"

        assert listed(driver) == {"alice": (1, 0)}
        unload(driver, "alice")
        load(driver, "bob")
        assert set(engine.adapters) == {2}


def test_the_least_recently_used_goes_where_there_is_no_room(tmp_path: Path) -> None:
    """If it is idle and not pinned; where none is, what is loaded stays and the new one is refused."""
    engine = HeldEngine()
    with build(tmp_path, engine, max_cpu_loras=3) as driver:
        load(driver, "first", path="alice", pin=True)
        load(driver, "first", path="alice")  # which stays pinned
        load(driver, "second", path="alice")
        load(driver, "third", path="alice")
        channel = submit(driver, "a", model="second", params=LONG)

        assert load(driver, "fourth", path="alice").endswith("; evicted for it: third")
        load(driver, "fourth", path="alice")  # another version takes the place of an idle one
        using = submit(driver, "b", model="fourth", params=LONG)
        for name in ("fifth", "fourth"):
            code, message = error_of(begin(driver, LoadAdapter, name, path="alice"))
            assert code == "overloaded" and "--max-cpu-loras" in message
        assert set(listed(driver)) == {"first", "second", "fourth"}
        assert driver.adapters.num_evictions == 1
        engine.may_step.set()
        text_of(list(channel))
        text_of(list(using))
        assert load(driver, "fifth", path="alice").endswith("; evicted for it: second")


def test_a_request_keeps_its_adapter_from_being_the_next_to_go(tmp_path: Path) -> None:
    """What counts is when an adapter was used, and not when it was loaded."""
    with build(tmp_path, max_cpu_loras=2) as driver:
        load(driver, "alice")
        load(driver, "bob")
        text_of(list(submit(driver, model="alice")))

        assert load(driver, "carol").endswith("; evicted for it: bob")


def test_a_failing_read_changes_nothing(tmp_path: Path) -> None:
    """Neither what is loaded under that name, nor what would have had to go."""
    with build(tmp_path, max_cpu_loras=1) as driver:
        load(driver, "alice")
        for path in ("bad", "nobody", "../elsewhere", "/etc", "alice\0"):
            for name in ("alice", "bob"):
                code, message = error_of(begin(driver, LoadAdapter, name, path=path))
                assert code == "invalid_request" and message.startswith(f"the adapter {name} cannot be served: ")
        assert listed(driver) == {"alice": (1, 0)}


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../alice", "a b", "a" * 129, "naïve", "a\0", "base", "alias"])
def test_names_are_checked(tmp_path: Path, name: str) -> None:
    """They end up in logs, metrics and paths; the model's own are taken."""
    with build(tmp_path) as driver, pytest.raises(InvalidRequest):
        load(driver, name, path="alice")


def test_commands_are_done_in_their_order(tmp_path: Path) -> None:
    """Loads of one name at once, an unload among them, and one that may not replace: the last one counts."""
    engine = SlowReader()
    with build(tmp_path, engine) as driver:
        engine.may_read.clear()
        first = begin(driver, LoadAdapter, "alice")
        assert engine.reads.acquire(timeout=30)
        others = [begin(driver, LoadAdapter, "alice"), begin(driver, UnloadAdapter, "alice")]
        last = [begin(driver, LoadAdapter, "alice", replace=False) for _ in range(2)]
        with pytest.raises(NotFound):  # nothing waits for it
            submit(driver, model="alice")
        engine.may_read.set()

        assert [text_of(list(one)).rpartition(": ")[2] for one in (first, *others)] == [
            "version 1, of rank 1",
            "version 2, of rank 1",
            "the adapter alice is unloaded",
        ]
        assert "version 3" in text_of(list(last[0]))
        assert error_of(last[1]) == (
            "invalid_request",
            "the adapter alice is loaded already: unload it, or load it in place",
        )
        assert listed(driver) == {"alice": (3, 0)}


def test_more_commands_than_can_wait_are_refused(tmp_path: Path) -> None:
    """At once, and steps go on while files are read, which the status shows."""
    engine = SlowReader()
    with build(tmp_path, engine) as driver:
        engine.may_read.clear()
        first = begin(driver, LoadAdapter, "alice")
        assert engine.reads.acquire(timeout=30)
        for _ in range(64):
            begin(driver, LoadAdapter, "bob")
        with pytest.raises(Overloaded):
            begin(driver, LoadAdapter, "bob")
        assert text_of(list(submit(driver))) == "abcab"
        assert driver.status().commands["load adapters"] > 0
        engine.may_read.set()
        text_of(list(first))


def test_adapters_come_and_go_asleep_but_not_while_draining(tmp_path: Path) -> None:
    """A sleeping driver has its adapters when it wakes; one that ends takes no more."""
    engine = FakeEngine()
    with build(tmp_path, engine) as driver:
        load(driver, "alice")
        driver.operations.sleep("s", slept := Listener())
        text_of(list(slept))
        load(driver, "bob")
        unload(driver, "alice")
        driver.operations.wake("w", woken := Listener())
        text_of(list(woken))
        text_of(list(submit(driver, model="bob")))
        drained = threading.Event()
        driver.drain(drained.set)
        assert drained.wait(30)
        with pytest.raises(Draining):
            begin(driver, LoadAdapter, "alice")
    assert engine.admitted[-1].adapter_id == 2


def test_a_fault_of_the_engine_ends_the_loading_of_one_adapter(tmp_path: Path) -> None:
    """And nothing else: that command is answered."""

    class Faulty(FakeEngine):
        def add_adapter(self, adapter: Adapter) -> None:
            if adapter.uid == 1:
                raise RuntimeError("a bug")
            super().add_adapter(adapter)

    with build(tmp_path, Faulty()) as driver:
        assert error_of(begin(driver, LoadAdapter, "alice"))[0] == "internal"
        assert listed(driver) == {}
        assert "version 2" in load(driver, "alice")


def test_a_driver_ends_while_an_adapter_is_read(tmp_path: Path) -> None:
    """Whoever waits for it is not waited for."""
    engine = SlowReader()
    with build(tmp_path, engine) as driver:
        engine.may_read.clear()
        begin(driver, LoadAdapter, "alice")
        assert engine.reads.acquire(timeout=30)
        driver.stop("enough", timeout=0.1)
        engine.may_read.set()


def test_the_first_adapters_are_there_from_the_start(tmp_path: Path) -> None:
    """Pinned, and below the root if there is one; one that cannot be served keeps the daemon from starting."""
    (tmp_path / "alice").mkdir()

    def build_unstarted(root: Root | None = None) -> oDriver:
        return oDriver(FakeEngine(), FakeTokenizer(), max_cpu_loras=2, adapter_root=root)

    driver = build_unstarted(Root(str(tmp_path), "adapter_root"))
    driver.load_first({"alice": "alice"})
    assert [(row.name, row.path, row.pinned) for row in driver.adapters.rows()] == [("alice", "alice", True)]
    with pytest.raises(ConfigurationError, match="lora_modules: bob: /etc is not below adapter_root"):
        driver.load_first({"bob": "/etc"})
    driver = build_unstarted()
    driver.load_first({"a": "/anywhere", "b": "/else"})
    for modules in ({"c": "/third"}, {"a": "/bad"}, {"a/b": "/x"}):
        with pytest.raises(ConfigurationError, match="lora_modules: "):
            driver.load_first(modules)
    driver.start()
    with pytest.raises(InvalidRequest, match="--adapter-root"):
        begin(driver, LoadAdapter, "a")
    assert unload(driver, "a") == "the adapter a is unloaded"
    driver.stop("the test is over")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("bob=nowhere", "bob: nowhere cannot be read: No such file"),
        ("bob=/etc", "bob: /etc is not below adapter_root"),
        ("a/b=alice", "a/b: 'a/b' can be no adapter's name"),
        ("demo=alice", "demo: demo is the model itself"),
        ("bob=dora", "bob: .*/dora: use_dora True is not served"),
        ("bob=cut", "bob: .*/cut/adapter_model.safetensors ends before"),
    ],
)
def test_faults_of_the_first_adapters_are_seen_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, why: str
) -> None:
    """That may take minutes, and a slip of the pen is in the path."""
    write_adapter(tmp_path / "alice", "llama2", ADAPTERS["llama2"]["one layer"])
    write_adapter(tmp_path / "dora", "llama2", AdapterKind("q_proj", 8, options={"use_dora": True}))
    weights = write_adapter(tmp_path / "cut", "llama2", AdapterKind("q_proj", 8)) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    built: list[EngineConfig] = []

    def build_engine(config: EngineConfig, *_: object, **__: object) -> None:
        built.append(config)
        raise ConfigurationError("the model is loaded")

    monkeypatch.setattr(engine.build, "build_engine", build_engine)
    config = EngineConfig(
        model=str(DEMO_MODEL), enable_lora=True, adapter_root=str(tmp_path), lora_modules=("alice=alice", module)
    )

    with pytest.raises(ConfigurationError, match=f"lora_modules: {why}"):
        start_up.load(config, lambda _: None, lambda _: None, lambda _, __: None)

    assert not built


class InProcess:
    """Operators and clients of a driver."""

    def __init__(self, driver: oDriver) -> None:
        self._driver = driver
        self._serials = itertools.count()

    def load(self, name: str) -> str:
        return load(self._driver, name)

    def unload(self, name: str) -> None:
        list(begin(self._driver, UnloadAdapter, name))

    def complete(self, client: int, name: str) -> str | None:
        """The text, perhaps only its beginning; None where there is no such adapter."""
        request_id = f"r{next(self._serials)}"
        try:
            params = {"max_tokens": NUM_TOLD}
            channel = submit(self._driver, request_id, params=params, model=name, client=str(client))
        except NotFound:
            return None
        if next(self._serials) % 3 == 0:
            self._driver.abort(request_id)
        return text_of(list(channel))


class OverSockets:
    """The same of a daemon."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._controls = {name: stack.enter_context(ControlClient(address)) for name in RACERS}
        self._clients = [stack.enter_context(Client(address)) for _ in range(len(RACERS))]

    def load(self, name: str) -> str:
        return self._controls[name].load_adapter(name)

    def unload(self, name: str) -> None:
        with suppress(RequestFailed):
            self._controls[name].unload_adapter(name)

    def complete(self, client: int, name: str) -> str | None:
        try:
            return self._clients[client].complete("x", model=name, max_tokens=NUM_TOLD).text
        except RequestFailed as error:
            assert error.code == "not_found"
            return None


@pytest.mark.parametrize(
    ("count", "sockets"),
    [
        (200, False),
        pytest.param(2500, False, marks=pytest.mark.exhaustive),
        pytest.param(2500, True, marks=pytest.mark.exhaustive),
    ],
)
def test_no_request_gets_anothers_adapter(tmp_path: Path, count: int, sockets: bool) -> None:
    """Nor another version than that which was there when it came, or a later one, or one that had been unloaded.

    Four operators load and unload a name each, ``count`` times, while four clients ask for all of them.
    """
    engine, state = TellingEngine(max_num_seqs=8), dict.fromkeys(RACERS, (0, 0))
    for name in RACERS:
        (tmp_path / name).mkdir()

    def operate(name: str) -> None:
        draw = random.Random(name)
        for number in range(count):
            state[name] = 2 * number + 1, state[name][1]  # odd: something is under way
            if draw.random() < 0.6 or number == count - 1:
                version = int(users.load(name).partition("version ")[2].partition(",")[0])
            else:
                users.unload(name)
                version = 0
            state[name] = 2 * number + 2, version

    def ask(client: int) -> int:
        draw, done = random.Random(client), 0
        while done < LEAST or not all(one.done() for one in operating):
            name = draw.choice(RACERS)
            before = state[name]
            text = users.complete(client, name)
            settled = state[name] == before and before[0] % 2 == 0
            if text is None:
                assert not settled or before[1] == 0
            elif told := re.match(r"(\w+) (\d+);", text):
                assert told[1] == name
                version = int(told[2])
                assert version == before[1] if settled else version >= before[1]
                done += 1
            else:
                assert f"{name} ".startswith(text[: len(name) + 1])
        return done

    with build(tmp_path, engine, max_cpu_loras=24) as driver, ExitStack() as stack:
        users: InProcess | OverSockets = InProcess(driver)
        if sockets:
            stack.enter_context(serving(f"ipc://{tmp_path}/o.sock", driver, model="base", enable_lora=True))
            users = OverSockets(f"ipc://{tmp_path}/o.sock", stack)
        threads = stack.enter_context(ThreadPoolExecutor(8))
        operating = [threads.submit(operate, name) for name in RACERS]
        assert min(threads.map(ask, range(4))) >= LEAST
        for one in operating:
            one.result()
        for name in listed(driver):
            unload(driver, name)
        text_of(list(submit(driver, "last")))
        driver.operations.reset_prefix_cache("r", emptied := Listener())
        text_of(list(emptied))  # behind every removal

        assert not engine.adapters


def test_the_log_names_the_adapter_of_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its version; that of the model itself has none."""
    with caplog.at_level("INFO", "driver.metrics.request_log"), build(tmp_path) as driver:
        load(driver, "alice")
        for number, model in enumerate(("alice", "base")):
            text_of(list(submit(driver, str(number), model=model)))

    with_adapter, without = caplog.records
    assert (with_adapter.adapter, with_adapter.adapter_version) == ("alice", 1)  # type: ignore[attr-defined]
    assert not hasattr(without, "adapter")
