"""The load generator: what it sends and when, and `odriver bench` against a daemon that echoes."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_driver import PATIENCE, FakeDriver, serving

from driver.errors import Overloaded
from ipc.benchmark.workload import Load, LoadError, send
from ipc.client import Client

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
NAMES = ("ttft", "tpot", "itl", "e2el")


class ParrotDriver(FakeDriver):
    """Answers a prompt of ids at once, with its first ids, a piece each; refuses prompts that begin with ``refused``."""

    refused: int | None = None

    def submit_request(self, request):
        if request.prompt[0] == self.refused:
            raise Overloaded("too many requests wait already")
        self.open[request.request_id] = request
        token_ids = (request.prompt * request.params["max_tokens"])[: request.params["max_tokens"]]
        for token_id in token_ids:
            self.say(request, "x", [token_id])
        self.finish(request, "length", len(token_ids))


@pytest.fixture
def address(tmp_path):
    """Where the server under test listens."""
    return f"ipc://{tmp_path}/o.sock"


@pytest.fixture
def driver(address):
    """A driver that is being served."""
    driver = ParrotDriver()
    with serving(address, driver):
        yield driver


def gaps(**settings):
    """Seconds between each request and the next."""
    return np.diff(Load(**{"num_prompts": 20001, "request_rate": 4.0} | settings).send_times())


def test_requests_come_at_the_rate_asked_for():
    """The gaps of a Poisson process have the mean 1 / rate, and as much deviation."""
    of_poisson = gaps()

    assert of_poisson.mean() == pytest.approx(0.25, rel=0.03)
    assert of_poisson.std() == pytest.approx(0.25, rel=0.03)


def test_burstiness_shapes_the_gaps_and_not_their_mean():
    """Gamma gaps of shape b have the deviation mean / sqrt(b)."""
    for burstiness in (0.25, 4.0):
        bursty = gaps(burstiness=burstiness)

        assert bursty.mean() == pytest.approx(0.25, rel=0.05)
        assert bursty.std() == pytest.approx(0.25 / math.sqrt(burstiness), rel=0.05)


def test_the_first_request_is_sent_at_once_and_without_a_rate_all_are():
    """Nobody waits for nothing."""
    assert Load(request_rate=0.001, num_prompts=2).send_times()[0] == 0
    assert Load(num_prompts=3).send_times() == [0.0, 0.0, 0.0]


def test_the_same_seed_makes_the_same_load():
    """Prompts and times; another seed makes another."""
    load = Load(num_prompts=5, request_rate=1.0, seed=7)
    same, other = Load(num_prompts=5, request_rate=1.0, seed=7), Load(num_prompts=5, request_rate=1.0, seed=8)

    assert (load.prompts(100), load.send_times()) == (same.prompts(100), same.send_times())
    assert load.prompts(100) != other.prompts(100)
    assert load.send_times() != other.send_times()


def test_prompts_are_of_the_vocabulary_and_the_length_asked_for():
    """Every id of it may come, and no other."""
    prompts = Load(num_prompts=50, random_input_len=40).prompts(10)

    assert [len(prompt) for prompt in prompts] == [40] * 50
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(10))


@pytest.mark.parametrize(
    "setting",
    [
        {"num_prompts": 0},
        {"random_output_len": 0},
        {"max_concurrency": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": -1.0},
        {"burstiness": math.inf},
        {"burstiness": 1e-300},
        {"request_rate": 1e-300},
        {"seed": -1},
    ],
)
def test_a_load_that_makes_no_sense_is_refused_by_name(setting):
    """With what was given."""
    (name, value), *_ = setting.items()

    with pytest.raises(LoadError, match=f"{name} must be .*, not {value}"):
        Load(**setting)


def test_more_tokens_than_memory_holds_are_refused():
    """Before they are made."""
    with pytest.raises(
        LoadError, match=r"num_prompts times random_input_len must be at most 100,000,000, not 12,800,000"
    ):
        Load(num_prompts=10**8)


@pytest.mark.usefixtures("driver")
def test_a_machine_that_has_no_more_threads_is_told_of_in_words(address, monkeypatch):
    """Each open request takes one, so there is something to do."""

    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with Client(address) as client, pytest.raises(LoadError, match=r"no more threads than \d+.* --max-concurrency"):
        send(client, [[1, 2]], {"max_tokens": 1})


@pytest.mark.usefixtures("driver")
def test_every_request_is_followed_to_its_end(address):
    """Its tokens are counted, and whoever asked hears of each."""
    heard = []

    with Client(address) as client:
        timelines = send(client, [[1, 2], [3, 4, 5]], {"max_tokens": 4}, on_end=heard.append)

    assert [(timeline.prompt_tokens, timeline.tokens, timeline.error) for timeline in timelines] == [
        (2, 4, None),
        (3, 4, None),
    ]
    assert sorted(timeline.prompt_tokens for timeline in heard) == [2, 3]


@pytest.mark.usefixtures("driver")
def test_an_answer_in_one_piece_has_one_arrival(address):
    """With all its tokens."""
    with Client(address) as client:
        (timeline,) = send(client, [[1, 2]], {"max_tokens": 3}, stream=False)

    assert [count for _, count in timeline.arrivals] == [3]


def test_a_request_that_fails_fails_alone(address, driver):
    """Its timeline says why, and the others have their answers."""
    driver.refused = 7

    with Client(address) as client:
        bad, good = send(client, [[7], [8]], {"max_tokens": 1}, max_concurrency=1)

    assert (bad.error, good.error) == ("too many requests wait already", None)


def bench(address, *arguments, stdout=subprocess.PIPE):
    """The command, run to its end."""
    command = [sys.executable, "-c", "import sys; from ipc.commands.cli import main; sys.exit(main())", "bench"]
    return subprocess.run(
        [*command, "--connect", address, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.usefixtures("driver")
def test_odriver_bench_writes_the_figures_of_vllm(address, tmp_path):
    """Under their names there, with what was asked for beside them."""
    path = tmp_path / "result.json"

    done = bench(address, "--num-prompts", "5", "--random-output-len", "3", "--result-filename", str(path))

    result = json.loads(path.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert {
        "backend": "odriver",
        "model_id": "parrot",
        "num_prompts": 5,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "completed": 5,
        "total_input_tokens": 5 * 128,
        "total_output_tokens": 5 * 3,
    }.items() <= result.items()
    latencies = {f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99") for name in NAMES}
    assert latencies < result.keys()
    assert {"duration", "request_throughput", "output_throughput", "total_token_throughput"} < result.keys()
    assert "5 of 5" in done.stdout


def test_odriver_bench_tells_of_failures_and_exits_with_1(address, driver):
    """Why, how many, and that it was not all right."""
    driver.refused = Load(num_prompts=3).prompts(257)[1][0]

    done = bench(address, "--num-prompts", "3", "--random-output-len", "1")

    assert done.returncode == 1
    assert "2 of 3" in done.stdout
    assert "1 failed: too many requests wait already" in done.stdout


@pytest.mark.usefixtures("driver")
def test_odriver_bench_refuses_a_load_that_makes_no_sense(address):
    """In words, before anything is sent."""
    done = bench(address, "--num-prompts", "0")

    assert (done.returncode, done.stderr) == (1, "odriver: num_prompts must be at least 1, not 0\n")


def test_odriver_bench_says_before_the_load_that_its_figures_cannot_be_saved(address, driver, tmp_path):
    """And sends nothing."""
    driver.submit_request = None

    done = bench(address, "--num-prompts", "1", "--result-filename", str(tmp_path / "nowhere" / "x.json"))

    why = f"the figures cannot be saved in {tmp_path}/nowhere/x.json: No such file or directory"
    assert (done.returncode, done.stderr) == (1, f"odriver: {why}\n")


def test_odriver_bench_leaves_no_file_without_figures(address, driver, tmp_path):
    """One that was there keeps what it had."""
    driver.refused = Load(num_prompts=1).prompts(257)[0][0]
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")

    for path in (new, old):
        assert bench(address, "--num-prompts", "1", "--result-filename", str(path)).returncode == 1

    assert not new.exists() and old.read_text() == "{}"


@pytest.mark.usefixtures("driver")
def test_odriver_bench_says_that_the_disk_is_full(address):
    """Where there was room for the file, and is none for the figures; a device has no length."""
    load = ("--num-prompts", "1", "--random-output-len", "1")
    full, null = (bench(address, *load, "--result-filename", path) for path in ("/dev/full", "/dev/null"))

    assert (full.returncode, null.returncode) == (1, 0)
    assert full.stderr.endswith("odriver: the figures cannot be saved in /dev/full: No space left on device\n")


@pytest.mark.usefixtures("driver")
def test_odriver_bench_keeps_its_figures_where_nobody_reads_the_table(address, tmp_path):
    """They are saved first."""
    path = tmp_path / "figures.json"
    load = ("--num-prompts", "1", "--random-output-len", "1", "--result-filename", str(path))
    with open("/dev/full", "w") as full:
        bench(address, *load, stdout=full)

    assert json.loads(path.read_text())["completed"] == 1


@pytest.mark.usefixtures("driver")
def test_odriver_bench_writes_into_a_pipe(address):
    """Which has no beginning to go back to."""
    done = bench(address, "--num-prompts", "1", "--random-output-len", "1", "--result-filename", "/dev/stdout")

    assert done.returncode == 0 and '"completed": 1' in done.stdout


def test_the_load_generator_loads_no_jax():
    """It may run beside the daemon that it measures."""
    code = "import sys, ipc.commands.requests.bench; print([name for name in ('jax', 'transformers', 'flax') if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)

    assert done.stdout == "[]\n"
