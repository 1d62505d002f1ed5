"""Two processes, as on two hosts, are one daemon: they give what one gives, and they leave together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import build_checkpoint
from free_ports import free_port
from tokenizer_files import build_byte_fallback, write_tokenizer
from xla_flags import xla_flags

from engine.config import EngineConfig
from engine.errors import ConfigurationError, HostsError
from engine.exit_codes import FAULT, STOPPED
from engine.hosts import agreement
from engine.hosts.agreement import _sum, check_facts_alike
from engine.hosts.follower import check_alike
from engine.sampling.logit_bias import neutral_bias
from engine.sampling.needs import Need
from engine.sampling.penalties import neutral_penalties
from engine.step.commands import (
    ForgetLogits,
    Joined,
    KeptRows,
    Landed,
    Leave,
    SampleKept,
    StepDescription,
    decode_answer,
    decode_command,
    encode,
)
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.service.facts_alike import facts_alike

ROOT = Path(__file__).parent.parent
ODRIVER = [sys.executable, "-c", "import sys; from ipc.commands.cli import main; sys.exit(main())"]
PATIENCE = 300
"""Seconds after which a process is taken for never getting ready, or never ending."""
SIZES = "--max-num-seqs 2 --max-num-batched-tokens 2 --max-model-len 40 --page-size 16 --num-pages 30"
"""Two sizes of steps to compile."""
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 1, "top_k": 40},
    {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {70: 3.0}},
    {"temperature": 1.0, "seed": 2, "structured_outputs": {"regex": "(fox|the)( fox)+"}},
]


class Process:
    """``odriver serve`` in a process of its own, with so many devices."""

    def __init__(self, directory: Path, *flags: str, devices: int = 1) -> None:
        self.address = f"ipc://{directory}/o.sock"
        self._log = directory / f"log {len(list(directory.glob('log *')))}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices)}
        command = [*ODRIVER, "serve", str(directory.parent / "model"), "--bind", self.address, *SIZES.split(), *flags]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stderr=log)

    def await_log(self, words: str) -> None:
        """Wait until it has logged this."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.log():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE)

    def end(self) -> None:
        """Leave nothing behind, however a test went."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is, and the compiled steps that all processes share."""
    place = tmp_path_factory.mktemp("hosts")
    tokenizer = build_byte_fallback()
    build_checkpoint(place / "model", "llama2", vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1, head_dim=16)
    write_tokenizer(place / "model", tokenizer)
    return place


def drafts_of(model: Path) -> str:
    """The setting by which this model drafts."""
    return f'{{"method": "draft_model", "model": "{model}", "num_speculative_tokens": 2}}'


@contextmanager
def both(*each: tuple[Path, list[str]]) -> Iterator[list[Process]]:
    """The processes of one daemon, each with its directory and flags; none is left behind."""
    together = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", str(len(each))]
    processes = [
        Process(directory, *together, *flags, "--process-id", str(number))
        for number, (directory, flags) in enumerate(each)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


@pytest.fixture
def two(place: Path, tmp_path: Path) -> Iterator[list[Process]]:
    """The two processes of a daemon, which have just begun."""
    directory = place / tmp_path.name
    directory.mkdir()
    with both((directory, []), (directory, [])) as processes:
        yield processes


@pytest.fixture(scope="module")
def alone(place: Path) -> list[Any]:
    """What one process with two devices gives."""
    directory = place / "alone"
    directory.mkdir()
    process = Process(directory, "--tensor-parallel-size", "2", devices=2)
    try:
        return answers(process.address)
    finally:
        process.end()


def answers(address: str) -> list[Any]:
    """What a daemon gives for ASKED, all at once."""
    with Client(address, timeout=PATIENCE) as client:
        streams = [
            client.generate("the fox", max_tokens=8, ignore_eos="structured_outputs" not in one, **one) for one in ASKED
        ]
        return [list(stream) for stream in streams]


def tokens(pieces: list[Any]) -> list[int]:
    """Of a whole answer."""
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.thorough
def test_two_processes_have_each_their_part_of_what_is_on_the_host(tmp_path: Path) -> None:
    """Pages and states of prompts that the devices have no room for come back from both hosts, and
    give what one process gives without a tier."""
    tokenizer = build_byte_fallback()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 96}
    write_tokenizer(build_checkpoint(tmp_path / "model", "qwen3_5", **sizes), tokenizer)
    flags = ["--page-size", "4", "--num-pages", "24", "--max-model-len", "56"]

    one = Process(made(tmp_path / "one"), *flags, "--tensor-parallel-size", "2", devices=2)
    try:
        alone, before = repeated(one.address)
    finally:
        one.end()
    with both(*[(made(tmp_path / "two"), [*flags, "--host-cache-gib", "0.01"])] * 2) as two:
        together, after = repeated(two[0].address)
        two[0].signal(signal.SIGTERM)
        ends = [process.wait() for process in two]

    assert together == alone and ends == [STOPPED, STOPPED], two[0].log() + two[1].log()
    assert after["host_bytes_loaded"] and after["host_states_cached"]
    assert after["prompt_tokens"] < before["prompt_tokens"]


@pytest.mark.thorough
def test_two_processes_have_each_their_part_of_a_draft_model(place: Path, alone: list[Any], tmp_path: Path) -> None:
    """The model drafts for itself, from another directory on each, and they give what one process gives without drafts."""
    copies = [shutil.copytree(place / "model", tmp_path / str(number) / "draft") for number in range(2)]
    directory = made(place / tmp_path.name)
    flags = ["--max-num-batched-tokens", "4", "--speculative-config"]
    configs = [drafts_of(copy) for copy in copies]
    with both(*[(directory, [*flags, config]) for config in configs]) as two:
        together = answers(two[0].address)
        with ControlClient(two[0].address) as control:
            after = control.status()
        two[0].signal(signal.SIGTERM)
        ends = [process.wait() for process in two]

    assert list(map(tokens, together)) == list(map(tokens, alone)), two[0].log()
    assert ends == [STOPPED, STOPPED], two[0].log() + two[1].log()
    assert after["num_accepted_tokens"]


@pytest.mark.thorough
def test_two_processes_draft_from_the_same_earlier_requests(place: Path, alone: list[Any], tmp_path: Path) -> None:
    """Asked again they have drafts of the first answers, and none when these are forgotten; always what one process gives
    without drafts. Where the processes differed the second would end."""
    config = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_history": 400}'
    flags = ["--max-num-batched-tokens", "4", "--speculative-config", config]
    with both(*[(made(place / tmp_path.name), flags)] * 2) as two:
        given, kept = [], []
        for _ in range(2):
            given += [answers(two[0].address), answers(two[0].address)]
            with ControlClient(two[0].address) as control:
                kept.append(control.status()["earlier_tokens"])
                control.reset_prefix_cache()
                after = control.status()
        two[0].signal(signal.SIGTERM)
        ends = [process.wait() for process in two]

    assert [list(map(tokens, each)) for each in given] == [list(map(tokens, alone))] * 4, two[0].log()
    assert ends == [STOPPED, STOPPED], two[0].log() + two[1].log()
    assert after["num_earlier_accepted_tokens"] and min(kept) > 20 and after["earlier_tokens"] == 0


def made(directory: Path) -> Path:
    """An empty directory."""
    directory.mkdir()
    return directory


def repeated(address: str) -> tuple[list[list[int]], Any]:
    """What a daemon gives to prompts that come again when others have taken their place, in turn
    and after a sleep; and its status."""
    given = []
    with Client(address, timeout=PATIENCE) as client, ControlClient(address) as control:
        for turn in range(3):
            for word in ("fox", "dog", "cat", "the"):
                stream = client.generate(f"{word} and fox " * 3, max_tokens=6, ignore_eos=True, temperature=0)
                given.append(tokens(list(stream)))
            if turn == 1:
                control.sleep()
                control.wake()
        return given, control.status()


@pytest.mark.thorough
def test_two_processes_give_what_one_gives(two: list[Process], alone: list[Any]) -> None:
    """Greedy, drawn, penalised, biased, under a grammar, with log-probabilities, and after a sleep. Told to stop, the
    one that has no clients has process 0 finish what is open, and both end with 0.
    """
    first, second = two

    together = answers(first.address)
    with ControlClient(first.address) as control:
        assert (control.sleep(), control.wake()) == ("asleep", "awake")
        assert control.status()["compilations_after_ready"] == 0
    again = answers(first.address)
    second.signal(signal.SIGTERM)

    assert [first.wait(), second.wait()] == [STOPPED, STOPPED], first.log() + second.log()
    for given in (together, again):
        assert [tokens(pieces) for pieces in given] == [tokens(pieces) for pieces in alone]
    assert "process 1 of 2 is ready" in second.log()
    assert "process 1: it was stopped by SIGTERM" in first.log()
    assert "Traceback" not in first.log() + second.log()


@pytest.mark.thorough
def test_a_daemon_ends_when_another_process_dies(two: list[Process]) -> None:
    """Process 0 tells its clients, says who has gone, and exits for a restart."""
    first, second = two
    with Client(first.address, timeout=PATIENCE) as client, client.generate("the", ignore_eos=True) as pieces:
        next(pieces)

        second.signal(signal.SIGKILL)

        with pytest.raises(RequestFailed):
            while True:
                for _ in pieces:
                    pass
                client.complete("the")
    assert first.wait() == FAULT, first.log()
    assert "process 1 has gone" in first.log()


def test_the_others_end_when_process_0_dies(two: list[Process]) -> None:
    """In the middle of a start, too: none waits for it."""
    first, second = two
    first.await_log("all others are there")

    first.signal(signal.SIGKILL)

    assert second.wait() not in (STOPPED, None)
    assert "process 0 has gone" in second.log() or "another task died" in second.log()  # jax may be quicker


@pytest.mark.thorough
def test_processes_that_draft_otherwise_do_not_start(place: Path, tmp_path: Path) -> None:
    """Both say in what they differ, whichever of them has more settings."""
    directory = made(place / tmp_path.name)
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1}']
    with both((directory, drafts), (directory, [])) as two:
        ends = [process.wait() for process in two]

    assert ends == [os.EX_CONFIG] * 2, two[0].log() + two[1].log()
    for process in two:
        assert "process 1 differs from process 0 in --speculative-config: start all with the same" in process.log()


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["the weights", "the weights of what drafts"])
def test_processes_of_other_weights_do_not_start(place: Path, tmp_path: Path, which: str) -> None:
    """A copy that is older has files of the same sizes, and tokens would be the same everywhere, of no model's."""
    older = shutil.copytree(place / "model", tmp_path / "model")
    build_checkpoint(older, "llama2", seed=1, **json.loads((older / "config.json").read_text()))
    here = made(place / tmp_path.name)
    if which == "the weights":
        runs: list[tuple[Path, list[str]]] = [(here, []), (made(tmp_path / "life"), [])]
    else:
        flags = ["--max-num-batched-tokens", "4", "--speculative-config"]
        runs = [(here, [*flags, drafts_of(model)]) for model in (place / "model", older)]
    with both(*runs) as two:
        ends = [process.wait() for process in two]

    assert ends == [os.EX_CONFIG] * 2, two[0].log() + two[1].log()
    for process in two:
        assert f"process 1 differs from process 0 in {which}: start all with the same" in process.log()


def test_facts_are_compared_by_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they have the same names whatever the settings, and another version's are not taken for others of ours."""
    model, draft = (build_checkpoint(tmp_path / name) for name in ("model", "draft"))
    methods = ['{"method": "ngram", "num_speculative_tokens": 1}']
    methods.append(f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 1}}')
    each = [facts_alike(EngineConfig(model=str(model), speculative_config=method)) for method in (None, *methods)]

    def compare(ours: dict[str, str], theirs: dict[str, str]) -> None:
        sums = iter([[[_sum(repr(list(facts)))] for facts in (ours, theirs)]])
        values = [[_sum(fact) for fact in facts.values()] for facts in (ours, theirs)]
        monkeypatch.setattr(agreement, "_gather", lambda _: next(sums, values))
        check_facts_alike(ours)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compare(each[0], each[0])
    with pytest.raises(ConfigurationError, match="process 1 differs from process 0 in --speculative-config: start"):
        compare(each[0], each[1])
    with pytest.raises(
        ConfigurationError, match=r"in --speculative-config, config\.json of the draft model, the files of"
    ):
        compare(each[1], each[2])
    with pytest.raises(ConfigurationError, match=r"process 1 has other settings .* same version of oDriver"):
        compare(each[0], {**each[0], "--of-tomorrow": "1"})


def test_what_is_said_arrives_as_it_was() -> None:
    """Arrays of any rank, rows of parameters, and what is missing."""
    step = StepDescription(
        4, np.arange(9, dtype=np.int32), Need.BIAS | Need.DRAW, [np.arange(5, dtype=np.int32)], [(3, neutral_bias(70))],
        [(1, neutral_penalties(70))], [], None, np.ones((2, 2, 64), np.int32), kept=KeptRows(3, np.array([1, 0], np.int32)),
        expected=np.full((2, 6), -1, np.int32),
    )  # fmt: skip

    arrived = decode_command(encode(step))

    assert isinstance(arrived, StepDescription)
    assert encode(arrived) == encode(step)
    np.testing.assert_array_equal(arrived.prompt_tokens, step.prompt_tokens)
    np.testing.assert_array_equal(arrived.bias[0][1].banned_after, neutral_bias(70).banned_after)
    assert arrived.penalties[0][1].repetition == np.float32(1)
    assert arrived.masks is None and arrived.expected.tolist() == [[-1] * 6] * 2
    assert arrived.kept is not None and (arrived.kept.number, arrived.kept.rows.tolist()) == (3, [1, 0])
    late = decode_command(encode(SampleKept(3, np.ones((2, 2), np.int32), Need.DRAW, np.full((2, 1), -1, np.int32))))
    assert isinstance(late, SampleKept)
    assert (late.number, late.needs, late.masks.tolist()) == (3, Need.DRAW, [[-1], [-1]])
    assert decode_command(encode(ForgetLogits(3))) == ForgetLogits(3)
    assert decode_command(encode(Leave(1, "x"))) == Leave(1, "x")
    assert decode_answer(encode(Joined(3))) == Joined(3)
    landed = decode_command(encode(Landed(np.array([5, 7], np.int32))))
    assert isinstance(landed, Landed)
    assert landed.token_ids.tolist() == [5, 7]


def test_a_process_whose_tokens_differ_says_where() -> None:
    """The step, the row and both tokens."""
    check_alike(7, np.array([1, 2]), np.array([1, 2]))

    with pytest.raises(HostsError, match="step 7 gave token 2 in row 1 here and 3 at process 0"):
        check_alike(7, np.array([1, 2]), np.array([1, 3]))
    with pytest.raises(HostsError, match="step 7 gave token 4 in row 1 here and 0 at process 0"):
        check_alike(7, np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 0]]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_processes": 2}, "go together"),
        ({"coordinator_address": "a:1"}, "go together"),
        (
            {"num_processes": 2, "coordinator_address": "a"},
            "coordinator_address must be process 0's HOST:PORT, .*, not a",
        ),
        ({"num_processes": 2, "coordinator_address": "[::1]:1"}, "a name or an IPv4 address"),
        ({"num_processes": 2, "coordinator_address": "a:1", "process_id": 2}, "process_id must be 0 to 1"),
        (
            {"num_processes": 2, "coordinator_address": "a:1", "staged_readiness": True},
            "staged_readiness is for one host",
        ),
    ],
)
def test_hosts_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    """With what to give."""
    with pytest.raises(ConfigurationError, match=words):
        EngineConfig(**settings)
