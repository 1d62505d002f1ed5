"""Two processes, as on two hosts, get new weights together: both write them, or neither does."""

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VARIANTS, Tensors, build_checkpoint, random_tensors
from free_ports import free_port
from test_live_weights import build
from test_several_hosts import PATIENCE, Process, answers, made, tokens
from tokenizer_files import build_byte_fallback, write_tokenizer

from engine.errors import ConfigurationError, HostsError
from engine.hosts import remote_weights
from engine.hosts.processes import Leader
from engine.hosts.remote_weights import RemoteProcess
from engine.hosts.sent_weights import stage_as_told
from engine.live.read_files import open_files
from engine.live.staging import StagedWeights
from engine.live.weight_source import StartWeights, WeightArrays, WeightFiles
from engine.models.weights.sources.fingerprint import fingerprint
from engine.models.weights.sources.tensor_source import Arrays
from engine.step.commands import DiscardWeights, decode_command
from ipc.client import Client
from ipc.connection import weight_transfer
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class Model:
    """A tiny model with weights of three seeds, and what each of them gives."""

    def __init__(self, place: Path) -> None:
        tokenizer = build_byte_fallback()
        self.place = place
        self._sizes = {"vocab_size": tokenizer.get_vocab_size(), "num_hidden_layers": 1, "head_dim": 16}
        for name, seed in (("model", 0), ("second/model", 2), ("third/model", 3)):
            write_tokenizer(build_checkpoint(place / name, "llama2", seed=seed, **self._sizes), tokenizer)

    def tensors(self, seed: int) -> Tensors:
        return random_tensors({**VARIANTS["llama2"].config, **self._sizes}, seed)

    def alone(self, name: str) -> list[list[int]]:
        """The tokens of one process with two devices that is started with a checkpoint."""
        process = Process(made(self.place / name / "alone"), "--tensor-parallel-size", "2", devices=2)
        try:
            return said(process.address)
        finally:
            process.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """For all tests of this file."""
    return Model(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def two(model: Model, tmp_path: Path) -> Iterator[list[Process]]:
    """The two processes of a daemon that reads weights from where the model is."""
    directory = made(model.place / tmp_path.name)
    flags = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    flags += ["--weights-root", str(model.place)]
    processes = [Process(directory, *flags, "--process-id", str(number)) for number in range(2)]
    yield processes
    for process in processes:
        process.end()


def said(address: str) -> list[list[int]]:
    """The tokens that a daemon gives to several requests at once."""
    return [tokens(pieces) for pieces in answers(address)]


@pytest.mark.thorough
def test_two_processes_serve_the_new_weights_or_both_the_old_ones(
    model: Model, two: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a directory that each reads, of arrays that process 0 has, and of one tensor in messages; what only process 1
    finds wrong changes nothing anywhere. After a sleep come those that were served, or none."""
    oracles = {name: model.alone(name) for name in (".", "second", "third")}
    first, second = two
    for process in two:
        process.await_log("ready")
    with ControlClient(first.address) as control:
        assert said(first.address) == oracles["."]

        assert control.update_weights("second/model", name="second") == 2
        assert said(first.address) == oracles["second"] != oracles["."]

        others, half = model.tensors(3), len(model.tensors(3)[Q_PROJ]) // 2
        spoilt = {**others, Q_PROJ: others[Q_PROJ].copy()}
        spoilt[Q_PROJ][half, 0] = np.nan  # the part of process 1 begins here
        with pytest.raises(RequestFailed, match=f"process 1: .*{Q_PROJ} holds NaN"):
            control.update_weights(spoilt)
        with pytest.raises(RequestFailed, match="in the checkpoint, but a decoder"):
            control.update_weights({"model.unheard_of": others[Q_PROJ]})
        assert said(first.address) == oracles["second"]

        control.sleep(2)
        assert control.wake() == "awake" and control.status()["weight_name"] == "second"
        assert said(first.address) == oracles["second"]

        version = control.update_weights({name: array for name, array in others.items() if name != Q_PROJ})
        monkeypatch.setattr(weight_transfer, "shares_memory", lambda address: False)
        assert control.update_weights({Q_PROJ: others[Q_PROJ]}) == version + 1
        assert said(first.address) == oracles["third"]

        control.sleep(2)
        assert "when an update brings all weights" in control.wake() and control.status()["awaits_weights"]
        with Client(first.address) as client, pytest.raises(RequestFailed, match="has no weights until its operator"):
            client.complete("the")
        control.update_weights(model.tensors(0))
        assert said(first.address) == oracles["."]
        assert control.status()["compilations_after_ready"] == 0

    assert "Traceback" not in first.log() + second.log()


@pytest.mark.thorough
def test_a_client_streams_while_the_weights_of_two_processes_change(two: list[Process]) -> None:
    """Both write them between the same two steps: a process whose tokens differed from process 0's would end all."""
    first, second = two
    with Client(first.address, timeout=PATIENCE) as client, ControlClient(first.address) as control:
        for turn in range(10):
            with client.generate("the fox", max_tokens=30, ignore_eos=True, temperature=0) as pieces:
                found = [next(pieces)]
                version = control.update_weights(f"{('second', 'third')[turn % 2]}/model", keep_cache=turn % 3 == 0)
                found += pieces
            assert len(tokens(found)) == 30 and found[-1].weight_versions[-1][0] in (version - 1, version)
        assert control.status()["compilations_after_ready"] == 0
    assert "Traceback" not in first.log() + second.log()


class Weights:
    """What LiveWeights does with a source: reads all of it, or refuses it."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}
        self.adapters: dict[int, Any] = {}

    def add_adapter(self, uid: int, arrays: Any) -> None:
        self.adapters[uid] = arrays

    def stage_weights(self, number: int, tensors: Any, again: Any = None) -> StagedWeights:
        for name in tensors.names:
            info = tensors.info(name)
            self.read[name] = tensors.read(name, tuple(slice(size // 2, size) for size in info.shape))
            if not np.isfinite(self.read[name].astype(np.float32)).all():
                raise ConfigurationError(f"{name} is not finite")
        return staged(number, fingerprint(tensors), again)


def staged(number: int, found: int, again: Any = None) -> StagedWeights:
    """With nothing to write."""
    return StagedWeights(number, "here", again, found, is_whole=True, num_bytes=0, num_tensors=0, parameters=None)  # type: ignore[arg-type]


class Others:
    """Process 0 and some others in threads, without their commands' loops."""

    def __init__(self, count: int) -> None:
        self.weights = [Weights() for _ in range(count)]
        self.commands: list[Any] = []
        self._ours, self._threads = [], []
        commands, remote = {}, {}
        for number, weights in enumerate(self.weights, start=1):
            ours, theirs = Pipe()
            heard, told = Pipe()
            commands[number], remote[number] = told, RemoteProcess(number, ours)
            self.commands.append(heard)
            self._ours.append(ours)
            self._threads.append(threading.Thread(target=stage_as_told, args=(weights, theirs), daemon=True))
            self._threads[-1].start()
        self.leader = Leader(commands, remote, lambda code, why: None, lambda why, seconds: None)

    def close(self) -> None:
        for heard in self.commands:
            heard.close()
        self.leader._thread.join(PATIENCE)  # it finds that they have gone, while its own ends are there
        for thread, ours in zip(self._threads, self._ours, strict=True):
            ours.close()
            thread.join(PATIENCE)


ARRAYS = {"a": np.arange(40_000, dtype=np.float32).reshape(200, 200), "b": np.float32(3.0), "c": np.zeros((0, 2), "f4")}


def test_each_process_reads_the_parts_that_it_needs_of_arrays_at_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, whatever their sizes; what one refuses is staged nowhere, and the next is."""
    monkeypatch.setattr(remote_weights, "PIECE_BYTES", 999)
    others = Others(2)
    tensors = Arrays(ARRAYS)

    others.leader.stage(0, WeightArrays(ARRAYS), tensors, lambda: staged(0, fingerprint(tensors)))

    for weights in others.weights:
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(weights.read[name], array[tuple(slice(n // 2, n) for n in np.shape(array))])
    spoilt = Arrays({**ARRAYS, "b": np.float32(np.nan)})
    with pytest.raises(ConfigurationError, match="process 1: b is not finite"):
        others.leader.stage(1, WeightArrays({}), spoilt, lambda: staged(1, fingerprint(spoilt)))
    assert [decode_command(heard.recv_bytes()) for heard in others.commands] == [DiscardWeights(1)] * 2
    others.leader.stage(2, WeightArrays(ARRAYS), tensors, lambda: staged(2, fingerprint(tensors)))
    others.close()


def test_a_refusal_of_process_0_is_told_to_all_and_a_lost_process_is_said() -> None:
    """Nobody keeps what will not be written."""
    others = Others(1)
    tensors = Arrays(ARRAYS)

    def refuse() -> StagedWeights:
        raise ConfigurationError("not here")

    with pytest.raises(ConfigurationError, match="not here"):
        others.leader.stage(7, WeightArrays(ARRAYS), tensors, refuse)
    assert decode_command(others.commands[0].recv_bytes()) == DiscardWeights(7)
    with pytest.raises(ConfigurationError, match="process 1 finds other weights in here than process 0"):
        others.leader.stage(8, WeightArrays(ARRAYS), tensors, lambda: staged(8, 1))
    others.close()
    with pytest.raises(HostsError, match="process 1 has gone"):
        others.leader.stage(9, WeightArrays(ARRAYS), tensors, lambda: staged(9, fingerprint(tensors)))


def test_what_another_process_refuses_is_kept_nowhere(tmp_path: Path) -> None:
    """However far process 0 had come; a failed read leaves as little."""
    engine = build(build_checkpoint(tmp_path / "one"))
    runner, tensors = engine._runner, random_tensors(VARIANTS["llama2"].config, 1)

    def refuse(number: int, *given: Any) -> StagedWeights:
        assert given[-1]().number == number  # staged here
        raise ConfigurationError("process 1 has other weights")

    runner._stage_everywhere = refuse
    with pytest.raises(ConfigurationError, match="process 1 has other"):
        engine.stage_weights(WeightArrays(tensors))

    assert not runner._executor._staged


def test_checkpoints_that_differ_have_other_fingerprints(tmp_path: Path) -> None:
    """Of the same names and sizes, too, as a host's stale copy has."""
    places = [build_checkpoint(tmp_path / str(number), seed=seed) for number, seed in enumerate((1, 1, 2))]
    found = []
    for place in places:
        with open_files(place) as tensors:
            found.append(fingerprint(tensors))

    assert found[0] == found[1] != found[2]
    assert fingerprint(Arrays(ARRAYS)) != fingerprint(Arrays({**ARRAYS, "b": np.float16(3.0)}))
    assert StartWeights() != WeightFiles("")
