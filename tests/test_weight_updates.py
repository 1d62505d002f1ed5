"""New weights from an operator to the engine: over the control socket and over HTTP, between two steps, and refused."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from fake_driver import FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer
from gateways import chat, gateway
from test_gateway_operators import FILE, OPS

from driver.errors import Asleep, Draining, DriverStopped, InvalidRequest, Overloaded
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample
from engine.hub.roots import Root
from engine.live.shared_arrays import open_shared
from engine.live.weight_source import SHARED_MEMORY, SharedArray, SharedWeights, WeightArrays, WeightFiles
from engine.request_limits import MAX_TENSOR_NAME_LENGTH, MAX_TENSORS
from ipc.connection import weight_transfer
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.gateway.access.callers import Callers
from ipc.gateway.operators import weights
from ipc.server.weight_uploads import IDLE_LIMIT, WeightUploads
from ipc.wire.operations import UpdateWeights, WeightChunk

PATIENCE = 300
ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.float16(3.0),
}


class Channel:
    """Where the samples of a request go."""

    def __init__(self) -> None:
        self.samples: SimpleQueue[ReturnSample] = SimpleQueue()

    def put(self, sample: ReturnSample) -> None:
        self.samples.put(sample)

    def get(self) -> ReturnSample:
        return self.samples.get(timeout=PATIENCE)

    def end(self) -> tuple[list[int], ReturnSample]:
        """All tokens of a request, and its last sample."""
        tokens: list[int] = []
        while True:
            sample = self.get()
            tokens += sample.token_ids
            if sample.is_last:
                return tokens, sample


class Served:
    """A driver of an engine whose tokens are its prompt's, over and over."""

    def __init__(self, gate: Any = None, on_failure: Any = None) -> None:
        self.engine = FakeEngine(gate=gate, max_model_len=100_000)
        self.driver = oDriver(self.engine, FakeTokenizer(), on_failure=on_failure)  # type: ignore[arg-type]
        self.driver.start()

    def ask(self, name: str, max_tokens: int = 4, **params: Any) -> Channel:
        channel = Channel()
        params = {"max_tokens": max_tokens, "temperature": 0, **params}
        self.driver.submit_request(ActiveRequest(request_id=name, channel=channel, prompt="abc", params=params))
        return channel

    def pause(self, mode: Any = "keep") -> Channel:
        channel = Channel()
        self.driver.operations.pause("p", channel, mode, clear_cache=False)
        return channel

    def resume(self) -> ReturnSample:
        channel = Channel()
        self.driver.operations.resume("r", channel)
        return channel.get()

    def update(self, mode: Any = "keep", source: Any = WeightFiles("new")) -> Channel:  # noqa: B008
        channel = Channel()
        self.driver.operations.update_weights("u", channel, source, mode)
        return channel


@pytest.fixture
def served() -> Iterator[Served]:
    """At the end nothing is left."""
    served = Served()
    yield served
    served.driver.stop("the test is over")
    assert not served.driver.status().open_requests


def test_an_update_comes_between_two_steps_and_answers_say_whose_their_tokens_are(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A request goes on: the versions of its answer have the index of the first token of each. The log has it too."""
    caplog.set_level("INFO")
    channel = served.ask("a", 15_000)
    first = channel.get()

    answer = served.update().get()
    tokens, last = channel.end()

    assert answer.weight_versions == [(2, 0)]
    (one, start), (two, index) = last.weight_versions
    assert (one, start, two) == (1, 0, 2) and len(first.token_ids) <= index < 15_000
    assert len(first.token_ids) + len(tokens) == 15_000
    assert served.driver.status().weight_version == 2
    logged = [record.getMessage() for record in caplog.records]
    assert any("version 2 of the weights: 1 tensors" in line for line in logged)
    assert any(f"weight_versions [(1, 0), (2, {index})]" in line for line in logged)
    assert served.ask("b").end()[1].weight_versions == [(2, 0)]


def test_answers_of_the_weights_of_the_start_say_nothing_of_them(served: Served) -> None:
    """As every answer was before weights could change."""
    assert served.ask("a").end()[1].weight_versions == []


def test_a_paused_driver_keeps_its_requests_and_holds_new_ones(served: Served) -> None:
    """No token comes until it is resumed; then both go on where they were."""
    kept = served.ask("a", 15_000)
    first = kept.get()
    assert served.pause().get().text == "paused"
    steps = served.engine.steps

    held = served.ask("b")
    assert served.update().get().weight_versions == [(2, 0)]

    assert (served.driver.status().state, served.engine.steps) == ("paused", steps)
    assert served.driver.status().seconds_since_progress == 0.0
    assert held.samples.empty()
    assert served.resume().text == "serving"
    assert held.end()[1].weight_versions == [(2, 0)]
    assert len(first.token_ids) + len(kept.end()[0]) == 15_000


def test_a_paused_driver_that_drains_resumes(served: Served) -> None:
    """What it keeps and what it holds finish at once, and it is paused no more."""
    kept = served.ask("a", 15_000)
    kept.get()
    served.pause().get()
    held, drained = served.ask("b"), threading.Event()

    served.driver.drain(drained.set)

    with pytest.raises(Draining):
        served.pause()
    assert held.end()[1].finish_reason == kept.end()[1].finish_reason == "length"
    assert drained.wait(PATIENCE)


class Gate(threading.Semaphore):
    """Holds the engine in its first step."""

    def __init__(self) -> None:
        super().__init__(0)
        self.entered = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self.entered.set()
        return super().acquire(blocking, timeout)


@pytest.mark.parametrize("command", ["pause", "update"])
def test_mode_wait_ends_what_is_open_first_and_holds_what_comes(command: str) -> None:
    """What was open has none of the new weights, and what came later has nothing else."""
    gate = Gate()
    served = Served(gate)
    before = served.ask("a", 3)
    assert gate.entered.wait(PATIENCE)  # a step holds the execution thread, so what is posted now stays in its inbox
    changed = served.pause("wait") if command == "pause" else served.update("wait")
    inbox, deadline = served.driver._execution.inbox, time.monotonic() + PATIENCE
    while not len(inbox) and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.release(1000)

    assert before.end()[1].weight_versions == []
    assert changed.get().error is None
    after = served.ask("b", 3)
    if command == "pause":
        assert served.update("wait").get().error is None
        served.resume()
    assert after.end()[1].weight_versions == [(2, 0)]
    served.driver.stop("the test is over")


@pytest.mark.parametrize("command", ["pause", "update"])
def test_mode_abort_ends_what_is_open(served: Served, command: str) -> None:
    """With the tokens that it has, of the weights that made them."""
    channel = served.ask("a", 30_000)
    channel.get()

    answer = (served.pause("abort") if command == "pause" else served.update("abort")).get()

    assert answer.error is None
    assert channel.end()[1].finish_reason == "abort"
    served.resume()
    assert served.ask("b").end()[1].finish_reason == "length"


def test_what_is_held_can_end(served: Served) -> None:
    """By an abort and by its timeout, though the engine has never known it."""
    served.pause().get()
    aborted, late = served.ask("a"), served.ask("b", timeout_s=0.05)

    served.driver.abort("a")

    assert aborted.end()[1].finish_reason == "abort"
    assert late.end()[1].finish_reason == "timeout"
    served.resume()
    assert served.ask("c").end()[1].finish_reason == "length"


def test_weights_that_cannot_be_read_change_nothing(served: Served) -> None:
    """The answer says why, and the next update is served."""
    served.engine.unreadable = "a.weight holds NaN"

    refused = served.update().get()
    served.engine.unreadable = ""

    assert refused.error is not None and (refused.error.code, refused.error.message) == (
        "invalid_request",
        "a.weight holds NaN",
    )
    assert served.driver.status().weight_version == 1
    assert served.update().get().weight_versions == [(2, 0)]


def test_weights_that_do_not_come_show_in_the_status_and_stall_nothing(served: Served) -> None:
    """As from a file system that hangs: requests are answered meanwhile, and no stage is busy."""
    served.engine.may_stage.clear()
    update = served.update()
    while not served.driver.status().commands["update weights"]:
        pass

    assert served.ask("a").end()[1].finish_reason == "length"
    assert set(served.driver.stages()) == {"prepare", "compile", "execution", "summary"}
    served.engine.may_stage.set()

    assert update.get().weight_versions == [(2, 0)]
    while served.driver.status().commands["update weights"]:
        pass


def test_a_fault_of_reading_weights_ends_its_update_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the traceback, and the next update is served."""
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "stage_weights", lambda _: {}["lost"])
        failed = served.update().get()

    assert failed.error is not None and failed.error.code == "internal" and "update weights" in failed.error.message
    assert "KeyError: 'lost'" in caplog.text
    assert served.update().get().weight_versions == [(2, 0)]


def test_an_update_that_would_wait_for_ever_is_refused(served: Served) -> None:
    """A paused driver keeps its requests: they end when it is resumed, and not before."""
    kept = served.ask("a", 15_000)
    kept.get()
    served.pause().get()

    refused = served.update("wait").get()

    assert refused.error is not None and "would never end" in refused.error.message
    assert len(served.engine.discarded) == 1 and not served.engine.written
    served.resume()
    kept.end()


def test_what_waits_for_requests_that_a_pause_keeps_is_refused(served: Served) -> None:
    """An update that came before it, too: the one that is to be written while it is paused would wait behind it. A sleep
    refuses nothing then."""
    kept = served.ask("a", 30_000)
    kept.get()
    waiting = served.update("wait")
    while not served.driver._execution._changes._deferred:
        time.sleep(0.001)
    served.pause().get()

    refused, updated = waiting.get(), served.update()
    with pytest.raises(InvalidRequest, match="would never end: resume it, or pause it in mode abort"):
        served.driver.operations.sleep("s", Channel(), 1)

    assert refused.error is not None and "would never end" in refused.error.message
    assert updated.get().weight_versions == [(2, 0)] and served.driver.status().state == "paused"
    held = served.ask("b")
    while not served.driver._execution.held:
        time.sleep(0.001)
    served.pause("abort").get()
    assert kept.end()[1].finish_reason == held.end()[1].finish_reason == "abort"
    slept = Channel()
    served.driver.operations.sleep("s", slept, 1)
    assert slept.get().text == "asleep"
    assert served.resume().text == "asleep"


def test_a_driver_whose_weights_cannot_be_read_again_sleeps_on(served: Served) -> None:
    """It refuses requests, and serves once they can be, or once others have come."""
    for remedy in ("read", "update"):
        channel = Channel()
        served.driver.operations.sleep("s", channel, 2)
        channel.get()
        served.engine.unreadable = "the bucket is away"
        served.driver.operations.wake("w", channel)
        refused = channel.get()
        assert refused.error is not None and "sleeps on: the bucket is away" in refused.error.message
        assert served.driver.status().state == "asleep"
        with pytest.raises(Exception, match="asleep"):
            served.ask("a")
        served.engine.unreadable = ""
        if remedy == "update":
            assert served.update().get().error is None
        served.driver.operations.wake("w", channel)
        assert channel.get().error is None
        assert served.ask("a").end()[1].finish_reason == "length"


def test_weights_are_read_beside_a_driver_that_is_to_wake(served: Served) -> None:
    """It does what else it is told, a sleep too, which undoes the wake; a second wake reads nothing that is there."""
    first, second, slept = Channel(), Channel(), Channel()
    served.driver.operations.sleep("s", slept, 2)
    slept.get()
    served.engine.may_stage.clear()
    served.driver.operations.wake("w", first)
    served.driver.operations.reset_prefix_cache("c", slept)
    assert "is empty" in slept.get().text
    served.driver.operations.sleep("s", slept, 1)
    assert slept.get().text == "asleep"
    for channel in (second, second):
        served.driver.operations.wake("w", channel)
    assert served.driver.seconds_since_progress == 0 and served.driver.status().state == "asleep"

    served.engine.may_stage.set()

    refused = first.get()
    assert refused.error is not None and "sent to sleep again before it woke" in refused.error.message
    assert [second.get().text for _ in range(2)] == ["awake", "awake"]
    assert served.ask("a").end()[1].finish_reason == "length"
    assert (len(served.engine.staged), len(served.engine.discarded)) == (2, 1)


def test_a_driver_that_reads_weights_to_wake_can_be_stopped() -> None:
    """Whoever waits for the wake hears that."""
    served, channel = Served(), Channel()
    served.driver.operations.sleep("s", channel, 2)
    channel.get()
    served.engine.may_stage.clear()
    served.driver.operations.wake("w", channel)

    served.driver.stop("enough", timeout=0.1)

    assert channel.get().error is not None
    served.engine.may_stage.set()


@pytest.mark.parametrize("woken_first", [True, False])
def test_a_driver_that_sleeps_without_weights_serves_when_all_have_come(served: Served, woken_first: bool) -> None:
    """Those that came as arrays cannot be read again: until an update brings all, requests hear what is missing."""
    channel = Channel()
    assert served.update(source=WeightArrays({})).get().error is None
    served.driver.operations.sleep("s", channel, 2)
    channel.get()
    if woken_first:
        served.driver.operations.wake("w", channel)
        assert "when an update brings all weights" in channel.get().text
    with pytest.raises(Asleep, match="no weights until its operator sends all of them"):
        served.ask("a")
    status = served.driver.status()
    assert (status.state, status.awaits_weights) == ("asleep", True)

    assert served.update(source=WeightArrays({})).get().error is None

    if not woken_first:
        with pytest.raises(Asleep, match="when it has been woken"):
            served.ask("a")
        served.driver.operations.wake("w", channel)
        assert channel.get().text == "awake"
    assert served.driver.status().state == "serving"
    assert served.ask("a").end()[1].finish_reason == "length"


def test_pages_alone_do_not_end_a_sleep_without_weights(served: Served) -> None:
    """Nor weights alone; nor does what ended an earlier sleep end a later one."""
    channel = Channel()
    served.update(source=WeightArrays({})).get()
    for first, second in (({"pages": False}, {"weights": False}), ({"weights": False}, {"pages": False})):
        served.driver.operations.sleep("s", channel, 2)
        channel.get()
        served.driver.operations.wake("w", channel, **first)
        channel.get()
        served.driver.operations.wake("w", channel, **second)
        channel.get()
        assert served.driver.status().state == "asleep"
        served.update(source=WeightArrays({})).get()
        assert served.driver.status().state == "serving"
    served.driver.operations.sleep("s", channel, 1)
    channel.get()
    served.update(source=WeightArrays({})).get()
    assert served.driver.status().state == "asleep"


def test_a_device_that_fails_while_it_writes_ends_the_driver_and_all_hear_why() -> None:
    """Neither the new weights nor the former ones are there: the update's sender and open requests are told so."""
    ended: SimpleQueue[str] = SimpleQueue()
    served = Served(on_failure=ended.put)
    channel = served.ask("a", 30_000)
    channel.get()
    served.engine.breaks = True

    answer = served.update().get()

    said = "the device failed while new weights were written, and has neither those nor the former ones"
    for error in (answer.error, channel.end()[1].error):
        assert error is not None and error.code == "internal" and said in error.message
    assert said in ended.get(timeout=PATIENCE)
    with pytest.raises(DriverStopped, match=said):
        served.ask("b")
    with pytest.raises(DriverStopped, match=said):
        served.update()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Below which a daemon may read weights."""
    (tmp_path / "weights" / "step-1").mkdir(parents=True)
    return tmp_path / "weights"


@pytest.fixture
def control(address: str, root: Path) -> Iterator[tuple[ControlClient, FakeDriver]]:
    """An operator's connection."""
    driver = FakeDriver()
    with serving(address, driver, weights_root=Root(str(root), "weights_root")), ControlClient(address) as client:
        yield client, driver


def test_a_path_is_one_below_the_root(control: tuple[ControlClient, FakeDriver], root: Path) -> None:
    """The driver gets where it is; any other is refused."""
    client, driver = control

    assert client.update_weights("step-1", mode="wait", keep_cache=True, name="first") == 2
    assert driver.updates == [(WeightFiles(str(root / "step-1")), "wait", True, "first")]
    for path in ("..", "step-2", "/etc"):
        with pytest.raises(RequestFailed):
            client.update_weights(path)
    assert len(driver.updates) == 1


def test_arrays_go_through_shared_memory_on_one_machine(
    control: tuple[ControlClient, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon reads what the arrays have, in each dtype; nothing of them is left behind."""
    client, driver = control
    found: dict[str, Any] = {}

    def update(request_id: str, channel: Any, source: Any, *rest: Any, **others: Any) -> None:
        with open_shared(source.arrays) as tensors:
            for name in tensors.names:
                found[name] = np.array(tensors.read(name, (slice(None),) * len(tensors.info(name).shape)))
        FakeDriver.update_weights(driver, request_id, channel, source, *rest, **others)

    monkeypatch.setattr(driver, "update_weights", update)

    assert client.update_weights({**ARRAYS, "t": np.arange(6.0).reshape(2, 3).T.astype(np.float32)}) == 2

    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    np.testing.assert_array_equal(found["t"], np.arange(6.0).reshape(2, 3).T)
    source = driver.updates[0][0]
    assert isinstance(source, SharedWeights)
    assert not any(Path(SHARED_MEMORY, array.object_name).exists() for array in source.arrays.values())


def test_more_tensors_than_a_message_holds_are_one_update(control: tuple[ControlClient, FakeDriver]) -> None:
    """A mixture may have tens of thousands."""
    client, driver = control
    longest = f"{'x' * (MAX_TENSOR_NAME_LENGTH - 5)}{{:05}}"
    many = {longest.format(at): np.zeros(1, np.float32) for at in range(2 * weight_transfer.TENSORS + 1)}

    assert client.update_weights(many, mode="wait", name="many") == 2

    ((source, *options),) = driver.updates
    assert list(source.arrays) == list(many) and options == ["wait", False, "many"]
    array = source.arrays[longest.format(0)]
    client._command(UpdateWeights("some", arrays={"a": array}, more=True))
    with pytest.raises(RequestFailed, match="a path or from shared memory, not from both"):
        client.update_weights("step-1")
    client._command(UpdateWeights("some", arrays={"a": array}, more=True))
    assert client.update_shared({"b": array}) == 3 and list(driver.updates[-1][0].arrays) == ["a", "b"]
    for wrong in (UpdateWeights("x", more=True), UpdateWeights("x", "step-1", {"a": array}, more=True)):
        with pytest.raises(RequestFailed, match="for arrays alone"):
            client._command(wrong)


def test_tensors_that_a_client_has_named_go_with_it() -> None:
    """They are of nobody else, and are as many as a checkpoint may have."""
    uploads, arrays = WeightUploads(), {"a": SharedArray("object", 0, "F32", [1])}
    uploads.add_shared(b"me", arrays)
    assert uploads.take_shared(b"you", None) is None
    uploads.lost(b"me")
    assert uploads.take_shared(b"me", None) is None
    with pytest.raises(InvalidRequest, match="at most"):
        uploads.add_shared(b"me", dict.fromkeys(map(str, range(MAX_TENSORS + 1)), arrays["a"]))
    assert uploads.take_shared(b"me", arrays) == arrays


def test_what_killed_trainers_left_in_shared_memory_is_removed_and_nothing_else() -> None:
    """It may be as large as a model. What has its process is locked."""
    abandoned = Path(SHARED_MEMORY, f"{weight_transfer.PREFIX}{os.getpid()}-abandoned")
    abandoned.write_bytes(b"x")

    arrays = weight_transfer.contiguous(ARRAYS)
    with weight_transfer.in_shared_memory(arrays) as first, weight_transfer.in_shared_memory(arrays):
        assert not abandoned.exists()
        assert all(Path(SHARED_MEMORY, array.object_name).exists() for array in first.values())


def test_arrays_go_in_messages_to_another_machine(
    control: tuple[ControlClient, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, each answered, with few under way; the driver gets them whole."""
    client, driver = control
    monkeypatch.setattr(weight_transfer, "shares_memory", lambda address: False)
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", 5)

    assert client.update_weights({**ARRAYS, "empty": np.zeros((0, 2), np.float32)}) == 2
    with pytest.raises(RequestFailed, match="stored as int16"):
        client.update_weights({"x": np.arange(100, dtype=np.int16), "y": np.zeros(3, np.float32)})
    assert client.status()["state"] == "serving"

    (source, *_), *others = driver.updates
    assert isinstance(source, WeightArrays) and not others
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(source.arrays[name], array)
        assert source.arrays[name].dtype == array.dtype


def chunk(
    name: str = "a", offset: int = 0, data: bytes = b"1234", shape: Any = (2,), dtype: str = "F32"
) -> WeightChunk:
    """All of its 4 of 8 bytes are right, unless a test says otherwise."""
    return WeightChunk("1", name, dtype, list(shape), offset, data)


def test_an_upload_is_one_clients_and_whole() -> None:
    """Another waits until it is taken, lost or idle; what is not in order ends it."""
    uploads = WeightUploads()
    uploads.add(b"me", chunk(), 0.0)
    with pytest.raises(Overloaded, match="another client"):
        uploads.add(b"you", chunk(), IDLE_LIMIT - 1)
    with pytest.raises(InvalidRequest, match="no weights have come"):
        uploads.take(b"you")
    with pytest.raises(InvalidRequest, match="4 bytes of a have not come"):
        uploads.take(b"me")
    for wrong in (chunk(offset=1), chunk(offset=8), chunk(data=b"12345"), chunk(shape=(3,)), chunk(dtype="F16")):
        uploads.add(b"me", chunk(), 0.0)
        with pytest.raises(InvalidRequest):
            uploads.add(b"me", wrong, 0.0)
        with pytest.raises(InvalidRequest, match="no weights have come"):
            uploads.take(b"me")
    uploads.add(b"me", chunk(), 0.0)
    uploads.add(b"you", chunk("b", data=b"12345678"), IDLE_LIMIT + 1)
    assert list(uploads.take(b"you")) == ["b"]
    uploads.add(b"me", chunk(), 0.0)
    uploads.lost(b"me")
    uploads.add(b"you", chunk(), 1.0)
    for shape in ((2**40, 2**20), (0, 2**63)):
        with pytest.raises(InvalidRequest, match="bytes, and the daemon's host has"):
            uploads.add(b"you", chunk("huge", shape=shape), 1.0)


def test_memory_of_others_is_not_read() -> None:
    """Neither what a link leads to, nor beyond its end."""
    with weight_transfer.in_shared_memory(weight_transfer.contiguous(ARRAYS)) as shared:
        array = shared["a.weight"]
        name = f"odriver-test-{os.getpid()}"
        Path(SHARED_MEMORY, name).symlink_to(Path(SHARED_MEMORY, array.object_name))
        try:
            for wrong, why in (
                ({"object_name": name}, "cannot be opened"),
                ({"offset": 10**6}, "are not within"),
                ({"offset": -4}, "are not within"),
                ({"shape": [-1, -6]}, "are not within"),
                ({"shape": [2**40]}, "are not within"),
            ):
                with pytest.raises(Exception, match=why), open_shared({"a": msgspec.structs.replace(array, **wrong)}):
                    pass
        finally:
            Path(SHARED_MEMORY, name).unlink()


def test_trainers_update_weights_over_http_in_four_phases(
    control: tuple[ControlClient, FakeDriver], address: str, tmp_path: Path
) -> None:
    """By vLLM's names, behind an operator's key: what is gathered is served at once."""
    _, driver = control
    api_keys = tmp_path / "api-keys.toml"
    api_keys.write_text(FILE)
    api_keys.chmod(0o600)

    def info(name: str) -> dict[str, Any]:
        return {
            "update_info": {
                "names": [name],
                "dtype_names": ["float32"],
                "shapes": [[2, 3]],
                "object_names": ["x"],
                "offsets": [0],
            }
        }

    with gateway(address, callers=Callers(api_keys)) as http:
        nccl = {"init_info": {"master_address": "10.0.0.1"}}
        told = [
            (answer.status_code, answer.json())
            for answer in (
                http.post("/init_weight_transfer_engine", headers=OPS, json=nccl),
                http.post("/init_weight_transfer_engine", headers=OPS, json={"init_info": {}}),
                http.post("/pause?mode=keep&clear_cache=false", headers=OPS),
                http.get("/is_paused", headers=OPS),
                http.post("/finish_weight_update", headers=OPS),
                http.post("/start_weight_update", headers=OPS, json={"is_checkpoint_format": True}),
                http.post("/update_weights", headers=OPS, json=info("a")),
                http.post("/update_weights", headers=OPS, json=info("b")),
                http.post("/finish_weight_update", headers=OPS, json={"weight_version": None}),
                http.post("/update_weights", headers=OPS, json={"update_info": {"path": "step-1"}}),
                http.post("/resume", headers=OPS),
                http.post("/update_weights", json=info("a")),
                http.post("/pause?mode=later", headers=OPS),
            )
        ]

    assert [status for status, _ in told] == [400, 200, 200, 200, 409, 200, 200, 200, 200, 200, 200, 401, 400]
    assert "not by master_address" in told[0][1]["error"]["message"]
    assert (told[2][1]["status"], told[3][1], told[10][1]["status"]) == ("paused", {"is_paused": True}, "resumed")
    assert [told[number][1]["message"] for number in (8, 9)] == [
        f"version {at} of the weights is served" for at in (2, 3)
    ]
    assert driver.paused_with == ("keep", False)
    (gathered, *_), _ = driver.updates
    assert isinstance(gathered, SharedWeights) and list(gathered.arrays) == ["a", "b"]


def test_an_operator_neither_adds_to_anothers_update_nor_ends_it(
    control: tuple[ControlClient, FakeDriver], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of two would be served as one; what has been silent for a minute is dropped, and is nobody's any more."""
    _, driver = control
    api_keys = tmp_path / "api-keys.toml"
    api_keys.write_text(FILE + '\n[others]\napi_key = "sk-others-0123456789"\noperator = true\n')
    api_keys.chmod(0o600)
    others = {"Authorization": "Bearer sk-others-0123456789"}
    places: dict[str, Any] = {"dtype_names": ["F32"], "shapes": [[2]], "object_names": ["x"], "offsets": [0]}
    mine, theirs = ({"update_info": {"names": [name], **places}} for name in "ab")

    with gateway(address, callers=Callers(api_keys)) as http:
        http.post("/start_weight_update", headers=OPS, json={})
        http.post("/update_weights", headers=OPS, json=mine)
        refused = [
            http.post("/update_weights", headers=others, json=theirs),
            http.post("/update_weights", headers=others, json={"update_info": {"path": "step-1"}}),
            http.post("/start_weight_update", headers=others, json={}),
            http.post("/finish_weight_update", headers=others),
        ]
        finished = http.post("/finish_weight_update", headers=OPS)
        http.post("/start_weight_update", headers=OPS, json={})
        http.post("/update_weights", headers=OPS, json=mine)
        monkeypatch.setattr(weights, "IDLE_LIMIT", 0.0)
        at_once = http.post("/update_weights", headers=others, json=theirs)
        dropped = http.post("/finish_weight_update", headers=OPS)

    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(409, "conflict")}
    assert finished.json() == {"message": "version 2 of the weights is served"}
    assert at_once.json() == {"message": "version 3 of the weights is served"} and dropped.status_code == 409
    sources = [source for source, *_ in driver.updates]
    assert [list(source.arrays) for source in sources if isinstance(source, SharedWeights)] == [["a"], ["b"]]


def test_all_phases_of_an_update_are_for_the_model_that_its_start_names(tmp_path: Path) -> None:
    """Others' weights stay as they are: a trainer need not say it again, and a phase that says another is refused, and
    changes nothing. An update of all has no phase for one."""
    owl, parrot = FakeDriver(), FakeDriver()
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in ("owl", "parrot")]
    api_keys = tmp_path / "api-keys.toml"
    api_keys.write_text(FILE)
    api_keys.chmod(0o600)
    places: dict[str, Any] = {"dtype_names": ["F32"], "shapes": [[2]], "object_names": ["x"], "offsets": [0]}
    body = {"update_info": {"names": ["a"], **places}}

    with (
        serving(addresses[0], owl, model="owl"),
        serving(addresses[1], parrot),
        gateway(*addresses, callers=Callers(api_keys)) as http,
    ):

        def post(path: str, **body: Any) -> tuple[int, str]:
            answer = http.post(path, headers=OPS, **({"json": body} if "finish" not in path else {}))
            return answer.status_code, (answer.json()["error"] if answer.is_error else answer.json())["message"]

        unknown = post("/start_weight_update?model=hen")
        post("/start_weight_update?model=owl")
        of_another = [post(f"/{phase}?model=parrot", **body) for phase in ("update_weights", "finish_weight_update")]
        gathered = [post("/update_weights", **body), post("/update_weights?model=owl", **body)]
        finished = post("/finish_weight_update")
        of_owl = len(owl.updates), len(parrot.updates)
        post("/start_weight_update")
        of_one = post("/update_weights?model=owl", **body)
        post("/update_weights", **body)
        of_all = post("/finish_weight_update")

    named = "model must be that of the start of the update, which is {}, not {}"
    assert unknown[0] == 404
    assert of_another == [(400, named.format("'owl'", "'parrot'"))] * 2
    assert gathered == [(200, "gathered")] * 2
    assert finished == (200, "version 2 of the weights is served") and of_owl == (1, 0)
    assert of_one == (400, named.format("none", "'owl'"))
    assert of_all[0] == 200 and (len(owl.updates), len(parrot.updates)) == (2, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", chat("a b")),
        ("/v1/responses", {"input": "a b"}),
    ],
)
def test_answers_over_http_say_which_weights_made_their_tokens(
    address: str, driver: FakeDriver, path: str, body: dict[str, Any], stream: bool
) -> None:
    """All APIs, whole and streamed; where weights never changed there is no such field."""
    with gateway(address) as http:
        before = http.post(path, json={**body, "stream": stream}).text
        driver.weight_versions = [(1, 0), (4, 1)]
        answer = http.post(path, json={**body, "stream": stream}).text

    assert "weight_versions" not in before
    assert answer.count('"weight_versions":[[1,0],[4,1]]') == 1
