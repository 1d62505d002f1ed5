"""The daemon with the model we ship, as a process, over real sockets."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from raw_client import RawClient
from xla_flags import xla_flags

from engine.exit_codes import MISCONFIGURED, STOPPED
from ipc.client import Client
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.wire.completion import Choice
from ipc.wire.messages import Error, Generate, Hello
from scripts.benchmarks.endurance.chaos import measure_chaos
from scripts.benchmarks.endurance.random_requests import send_random

ROOT = Path(__file__).parent.parent
ODRIVER = [sys.executable, "-c", "import sys; from ipc.commands.cli import main; sys.exit(main())"]
PATIENCE = 300
"""Seconds after which a daemon is taken for never getting ready, or never ending."""
MAX_MODEL_LEN = 256
FLAGS = f"--max-num-seqs 4 --max-num-batched-tokens 8 --max-model-len {MAX_MODEL_LEN}".split()
"""Few shapes to compile, more requests than slots, prompts of several steps."""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """One device."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags()}


class Process:
    """``odriver serve`` in a process of its own."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.address = f"ipc://{directory}/o.sock"
        self._log = directory / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*ODRIVER, "serve", "--bind", self.address, *FLAGS], env=environment, stderr=log
            )

    def connect(self) -> Client:
        """A client, when the daemon is ready."""
        return Client(self.address, timeout=PATIENCE)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(PATIENCE)

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def process(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A daemon for all tests of this module; at the end it stops as it should."""
    process = Process(tmp_path_factory.mktemp("daemon"), environment)
    yield process
    process.terminate()
    assert process.wait() == STOPPED, process.log()
    assert "Traceback" not in process.log()


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[Client]:
    """A client of it."""
    with process.connect() as client:
        yield client


def assert_idle(client: Client) -> None:
    """Nothing runs, no page is owned, and nothing has been compiled since READY; ends that are on their way are awaited."""
    while (status := client.status())["open_requests"] or status["running"] or status["waiting"]:
        pass
    assert status["pages_owned"] == 0
    assert status["pages_free"] + status["pages_cached"] == status["pages_total"]
    assert status["compilations_after_ready"] == 0


def test_a_hang_up_while_all_is_imported_ends_no_start(environment: dict[str, str]) -> None:
    """From the command's first line on: there is nothing yet that would have to be read again."""
    code = """
import os, signal, sys
class Hup:
    def find_spec(self, name, *_):
        if name in ("ipc.commands.cli", "ipc.service.daemon", "jax"):
            print(name, flush=True)
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, Hup())
sys.argv = ["odriver", "serve", "--bind", "tcp://nowhere"]
from ipc.main import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )

    assert done.stdout.split()[:2] == ["ipc.commands.cli", "ipc.service.daemon"]
    assert done.returncode == MISCONFIGURED, done.stderr


def test_a_completion_streams(client: Client) -> None:
    """The pieces come with their token ids, and the last one with the count of all."""
    pieces = list(client.generate("Once upon a time", max_tokens=20, temperature=0, ignore_eos=True))

    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces).strip()
    assert sum(len(piece.token_ids) for piece in pieces) == 20
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 20


def test_nothing_compiles_whatever_is_asked(client: Client) -> None:
    """Requests of random lengths and parameters, many at once, are all served with what was compiled before READY."""
    assert send_random(client, 100) == []

    assert_idle(client)


def test_token_ids_are_a_prompt_too(client: Client) -> None:
    """As many tokens come as were asked for."""
    whole = client.complete([1, 5, 9], max_tokens=16, ignore_eos=True)

    assert len(whole.token_ids) == 16
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 16)


def test_a_chat_goes_through_the_template(client: Client) -> None:
    """The model is given more than the words of the question, and answers."""
    question = [{"role": "user", "content": "What is 3 + 4?"}]

    *_, last = client.chat(question, max_tokens=8, temperature=0)

    bare = client.complete("What is 3 + 4?", max_tokens=1)
    assert last.usage is not None
    assert last.usage.prompt_tokens > bare.usage.prompt_tokens


def test_requests_at_once_get_what_they_get_alone(client: Client) -> None:
    """32 of them, short and long, greedy and drawn, on 4 slots: each has exactly the text it has alone."""

    def complete(number: int) -> list[Choice]:
        prompt = "Once upon a time there was a fox. " * (number % 5) + f"Number {number} was"
        temperature = 0.0 if number % 2 else 0.8
        return client.complete(
            prompt, max_tokens=8 + number, temperature=temperature, seed=number, ignore_eos=True
        ).choices

    alone = [complete(number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(complete, range(32)))

    assert together == alone
    assert_idle(client)


def test_leaving_early_frees_what_the_request_held(client: Client) -> None:
    """The daemon stops working on it."""
    with client.generate("Once upon a time", ignore_eos=True) as pieces:
        next(pieces)

    assert_idle(client)


BAD = {
    "an empty prompt": ({"prompt": ""}, "empty"),
    "no token ids": ({"prompt": []}, "empty"),
    "neither prompt nor messages": ({}, "exactly one"),
    "a prompt over the context": ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, str(MAX_MODEL_LEN)),
    "a token id outside the vocabulary": ({"prompt": [1, 10**9]}, "prompt[1]"),
    "a negative token id": ({"prompt": [-1]}, "prompt[0]"),
    "max_tokens of 0": ({"prompt": "x", "params": {"max_tokens": 0}}, "max_tokens"),
    "negative max_tokens": ({"prompt": "x", "params": {"max_tokens": -5}}, "max_tokens"),
    "max_tokens over the context": ({"prompt": "x", "params": {"max_tokens": MAX_MODEL_LEN + 1}}, str(MAX_MODEL_LEN)),
    "a parameter out of range": ({"prompt": "x", "params": {"top_p": 1.5}}, "top_p"),
    "a parameter of a wrong type": ({"prompt": "x", "params": {"temperature": "hot"}}, "temperature"),
    "an unknown parameter": ({"prompt": "x", "params": {"temprature": 1}}, "'temprature'"),
    "a parameter that is no number": ({"prompt": "x", "params": {"temperature": float("nan")}}, "temperature"),
    "no messages": ({"messages": []}, "message"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "messages[0]"),
}


@pytest.mark.parametrize(("fields", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_an_error_to_its_sender_alone(
    process: Process, client: Client, fields: dict[str, Any], words: str
) -> None:
    """It names what is wrong; a request beside it gets what it would have got."""
    params = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    expected = client.complete("Once upon a time", **params).text
    good = client.generate("Once upon a time", **params)
    with RawClient(process.address) as bad:
        bad.greet()

        answer = bad.ask(Generate("bad", **fields))

        assert isinstance(answer, Error)
        expected_code = "context_length_exceeded" if words == str(MAX_MODEL_LEN) else "invalid_request"
        assert (answer.request_id, answer.code) == ("bad", expected_code)
        assert words in answer.message
    assert "".join(piece.text for piece in good) == expected


def test_malformed_messages_and_unknown_versions_are_errors_to_their_sender_alone(
    process: Process, client: Client
) -> None:
    """The daemon goes on for everybody else."""
    with RawClient(process.address) as bad:
        assert bad.ask(Hello(99)).code == "unsupported_version"  # type: ignore[union-attr]
        bad.greet()
        bad.send(b"\xc1")
        assert bad.hear().code == "invalid_request"  # type: ignore[union-attr]
        bad.send(b"one", b"frame", b"too many")
        assert bad.hear().code == "invalid_request"  # type: ignore[union-attr]
        bad.send(b"\xc1" * 5_000_000)
        assert bad.hear().code == "message_too_long"  # type: ignore[union-attr]

    assert client.complete("Once", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_a_daemon_that_has_slept_goes_on_as_before(process: Process, client: Client) -> None:
    """Asleep it has no memory for pages and takes no work; awake it gives the same tokens, and compiles nothing."""
    ask = partial(client.complete, "Once upon a time", max_tokens=20, temperature=0)
    before = ask().token_ids

    with ControlClient(process.address) as control:
        assert control.sleep() == "asleep"
        with pytest.raises(RequestFailed) as refused:
            ask()
        assert control.status()["asleep"]
        assert control.wake() == "awake"

    assert refused.value.code == "asleep"
    assert ask().token_ids == before
    assert_idle(client)


def test_a_request_id_in_use_is_refused(process: Process) -> None:
    """The one that has it goes on to its end."""
    with RawClient(process.address) as client:
        client.greet()
        client.say(Generate("a", prompt="Once upon a time", params={"max_tokens": 100, "ignore_eos": True}))
        client.say(Generate("a", prompt="There was"))

        messages = [client.hear()]
        while type(messages[-1]).__name__ != "Done":
            messages.append(client.hear())

    errors = [message for message in messages if isinstance(message, Error)]
    assert [(error.request_id, error.code) for error in errors] == [("a", "duplicate_request")]


def run_odriver(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return subprocess.run(
        [*ODRIVER, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_line_tells_what_the_client_tells(
    process: Process, client: Client, environment: dict[str, str]
) -> None:
    """The same completion, and the same numbers."""
    flags = ["--connect", process.address]
    expected = client.complete("Once upon a time", max_tokens=20, temperature=0).text

    completed = run_odriver(
        environment, "complete", "Once upon a time", "--max-tokens", "20", "--temperature", "0", *flags
    )
    status = json.loads(run_odriver(environment, "status", "--json", *flags).stdout)

    assert completed.stdout == expected + "\n"
    assert status.keys() == client.status().keys()
    assert (status["model"], status["running"], status["pages_owned"]) == ("demo", 0, 0)


def test_a_second_daemon_finds_the_address_in_use(
    process: Process, client: Client, environment: dict[str, str]
) -> None:
    """It exits as misconfigured, says why, and the first one goes on."""
    second = run_odriver(environment, "serve", "--bind", process.address)

    assert second.returncode == MISCONFIGURED == 78
    assert f"address in use: another daemon listens at {process.address}" in second.stderr
    assert client.status()["model"] == "demo"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/nonexistent"], "/nonexistent"),
        (["--bind", "ipc:///nonexistent/o.sock"], "/nonexistent"),
        *(
            pytest.param(flags, words, marks=pytest.mark.thorough)
            for flags, words in [
                (["--num-pages", "3"], "too few"),
                (["--page-size", "0"], "page_size must be at least 1"),
                (["--max-model-len", "1000000"], "max_model_len 1000000"),
                (["--hbm-utilization", "1.5"], "hbm_utilization"),
                (["--bind", "http://0.0.0.0:5555"], "is no address"),
            ]
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    environment: dict[str, str], tmp_path: Path, flags: list[str], words: str
) -> None:
    """The exit code tells systemd not to try again."""
    bind = [] if "--bind" in flags else ["--bind", f"ipc://{tmp_path}/o.sock"]

    done = run_odriver(environment, "serve", *bind, *flags)

    assert done.returncode == MISCONFIGURED
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_nobody_can_tell_that_daemon_client_and_batch_were_killed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -9, under load: greedy, drawn, penalised, stopped texts, half characters, a regex, several samples."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    figures = list(measure_chaos(0, *FLAGS, lines=28, max_tokens=100, clients=1, kills=1))

    assert [figure.value for figure in figures] == [56, 1, 2]


def test_a_stopped_daemon_tells_open_requests_why(environment: dict[str, str], tmp_path: Path) -> None:
    """Those that run and those that wait; it takes no more, exits with 0 and leaves no socket behind."""
    process = Process(tmp_path, {**environment, "ODRIVER_DRAIN_TIMEOUT": "0"})
    with process.connect() as client:
        streams = [client.generate("Once upon a time", ignore_eos=True) for _ in range(20)]
        next(streams[0])

        process.terminate()

        for stream in streams:
            try:
                assert list(stream)[-1].finish_reason == "length"
            except RequestFailed as failure:
                assert (failure.code, failure.message) == ("stopped", "the daemon was stopped by SIGTERM")
    assert process.wait() == STOPPED, process.log()
    assert "Traceback" not in process.log()
    assert not (tmp_path / "o.sock").exists()


def test_the_page_is_there_until_ctrl_c(environment: dict[str, str], tmp_path: Path) -> None:
    """``odriver serve --web`` says where it is, and leaves no process behind."""
    command = [*ODRIVER, "serve", "--web", "--bind", f"ipc://{tmp_path}/o.sock", *FLAGS]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"page (http://\S+/)", line)))
        children = psutil.Process(process.pid).children(recursive=True)
        body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
        answer = httpx.post(f"{url}v1/chat/completions", json=body, timeout=PATIENCE).json()
        page = httpx.get(url, timeout=PATIENCE)

        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE)

    assert answer["choices"][0]["message"]["content"] == "3 + 4 is 7."
    assert page.status_code == 200
    assert code == 0
    assert psutil.wait_procs(children, PATIENCE)[1] == []
