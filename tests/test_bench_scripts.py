"""scripts/bench: the models it writes, the turns it takes, its null model and what it makes of the figures."""

import json
import sys
from io import StringIO

import msgspec
import numpy as np
import pytest
from loading import load
from rich.console import Console

from engine.models.model_config import read_model_config
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from ipc.benchmark.timeline import Timeline
from scripts.benchmarks import __main__ as command
from scripts.benchmarks import host
from scripts.benchmarks.clients.workload import Prompts, Workload, timelines_of
from scripts.benchmarks.endurance.random_requests import PARAMETERS, random_params
from scripts.benchmarks.figures.figure import figure, ratio
from scripts.benchmarks.figures.plot import plot
from scripts.benchmarks.figures.report import save, show
from scripts.benchmarks.grammar import FORM, measure_grammar
from scripts.benchmarks.limits import Limits
from scripts.benchmarks.models import END, SIZES, Size, size_of, tokenizer, write_model
from scripts.benchmarks.peers.systems import Ours
from scripts.benchmarks.prefill import measure_prefill
from scripts.benchmarks.processes.null_model import TOKEN, driver_step_time, null_engine, step_times
from scripts.benchmarks.serve import measure_serve, take_turns

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("an_idle_machine")]

SIZE = Size(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, vocabulary=300)


class ClockworkSystem:
    """Makes a token of each request every ``1 / rate`` seconds, on a clock of its own, and remembers who asked."""

    def __init__(self, name, rate, asked=None):
        self.name = name
        self.asked = asked if asked is not None else []
        self._rate = rate

    def run(self, workload):
        self.asked.append((self.name, workload))
        times = [(number + 1) / self._rate for number in range(workload.max_tokens)]
        arrivals = [(at, 1) for at in times] if workload.stream else [(times[-1], len(times))]
        return [Timeline(len(prompt), 0.0, arrivals) for prompt in workload.prompts]


def build_limits(flop=1000.0):
    """4 kB a second and a kFLOP a second."""
    return Limits(bandwidth={"a": [1000.0, 4000.0], "b": [2000.0]}, sgemm=[flop - 100, flop], matrices={})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model as the benchmark writes them, but very small."""
    directory = tmp_path_factory.mktemp("models") / "wee"
    write_model(directory, SIZE)
    return directory


def test_a_benchmark_model_is_one_that_we_serve(directory):
    """Its config, and every weight, are what the loader calls for."""
    model = read_model_config(directory)

    decoder = load(directory)

    assert size_of(directory) == SIZE
    assert (model.num_kv_heads, model.vocab_size, model.tied_embeddings) == (2, 300, True)
    assert np.std(decoder.embedding.get_value().values) == pytest.approx(0.02, rel=0.05)
    assert {path.name for path in directory.parent.iterdir()} == {"wee"}


def test_a_benchmark_model_is_the_same_each_time(directory, tmp_path):
    """Seed 0."""
    write_model(tmp_path / "again", SIZE)

    for path in directory.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_the_sizes_are_those_that_were_agreed():
    """small reads 400 MB a step in float32."""
    assert 4 * SIZES["small"].parameters == pytest.approx(400e6, rel=0.01)
    assert SIZES["tiny"].parameters == 15_191_712


def test_flop_are_two_for_each_weight_and_token_and_attention_is_causal():
    """A layer of SIZE has 16*16 + 2*16*8 + 16*16 + 3*16*24 weights, a head 300*16."""
    linear = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24)

    assert SIZE.linear_parameters == linear
    assert SIZE.decode_flop(rows=3) == 2 * 3 * (linear + 300 * 16)
    pairs = 1 + 2 + 3
    assert SIZE.prefill_flop(tokens=3) == 2 * 3 * linear + 4 * pairs * 16 * 2 + 2 * 300 * 16


def test_the_benchmark_tokenizer_speaks_any_text_and_every_id():
    """Bytes in; bytes, words and an unseen end mark out."""
    words = tokenizer(32000)

    assert words.decode(words.encode("grüße 1").ids) == "grüße 1"
    assert words.get_vocab_size() == 32000
    assert words.decode([0, 31999]).isprintable()
    assert END not in words.decode([0, 31999])


def test_systems_take_turns_with_prompts_that_never_come_twice():
    """A B A B, after a short run of each that isn't counted."""
    asked = []
    systems = [ClockworkSystem("a", 1, asked), ClockworkSystem("b", 1, asked)]
    prompts = Prompts(300)

    runs = take_turns(systems, lambda: Workload(prompts.take(2, 3), 6), repeats=2)

    assert [name for name, _ in asked] == ["a", "b", "a", "b", "a", "b"]
    assert [workload.max_tokens for _, workload in asked] == [4, 4, 6, 6, 6, 6]
    sent = [tuple(prompt) for _, workload in asked for prompt in workload.prompts]
    assert len(set(sent)) == len(sent) == 12
    assert {name: len(repetitions) for name, repetitions in runs.items()} == {"a": 2, "b": 2}


def test_serving_is_measured_against_others_and_the_limits():
    """A token every 0.1 s for each of ours and every 0.2 s for each of theirs."""
    ours, theirs = ClockworkSystem(Ours.name, 10), ClockworkSystem("theirs", 5)

    figures = measure_serve("wee", SIZE, Prompts(300), ours, [theirs], build_limits, repeats=2)

    by_name = {figure.name: figure for figure in figures}
    assert by_name["decode, 1 at once"].value == pytest.approx(10)
    assert by_name["decode, 1 at once"].ratios == {"theirs": pytest.approx(2)}
    assert by_name["decode, 1 at once"].limit == pytest.approx(1000 / SIZE.decode_flop(1))
    assert by_name["16 streams"].value == pytest.approx(160)
    assert by_name["16 streams, ITL p50"].value == pytest.approx(100)
    assert by_name["16 streams, ITL p50"].ratios == {"theirs": pytest.approx(2)}
    assert by_name["16 streams, of unstreamed tok/s"].value == pytest.approx(100)
    assert {"16 streams, TTFT p50", "16 streams, TTFT p99", "16 streams, ITL p99"} < by_name.keys()


def test_a_rate_is_held_against_the_limits_of_its_own_turns():
    """One row at a time: of limits that were half, as much and twice in three turns it is given the middle one."""
    ours = ClockworkSystem(Ours.name, 10)
    found = iter([build_limits(flop) for flop in (2000.0, 500.0, 1000.0)] * 3)

    figures = measure_serve("wee", SIZE, Prompts(300), ours, [], lambda: next(found), repeats=3)

    assert next(figures).limit == pytest.approx(1000 / SIZE.decode_flop(1))


def test_prefill_is_the_prompt_over_the_time_to_its_first_token():
    """512 tokens in a tenth of a second."""
    ours = ClockworkSystem(Ours.name, 10)

    first, second = measure_prefill("wee", SIZE, Prompts(300), ours, [], build_limits, repeats=1)

    assert (first.value, second.value) == (pytest.approx(5120), pytest.approx(20480))


def test_a_row_with_a_schema_is_measured_beside_one_without():
    """In turns, with the neighbours' rate of the one of the other; the first pair isn't counted."""
    many, asked = ClockworkSystem("many", 10), []
    one = ClockworkSystem("one", 5, asked)

    figures = {figure.name: figure for figure in measure_grammar("wee", Prompts(300), many, one, repeats=2)}

    assert [workload.structured_outputs for _, workload in asked] == [FORM, None, FORM, None, FORM]
    assert figures["63 rows beside one with a schema"].value == pytest.approx(630)
    assert figures["63 rows beside one with a schema, of beside one without"].value == pytest.approx(100)
    assert figures["the row with a schema, ITL p50"].value == pytest.approx(200)


def test_a_request_that_fell_short_is_no_figure():
    """The benchmark ends, and says what came."""
    system = ClockworkSystem("ours", 10)
    system.run = lambda _: [Timeline(1, 0.0, [(1.0, 1)], error="gone")]

    with pytest.raises(SystemExit, match="a request of 3 tokens gave 1: gone"):
        timelines_of(system, Workload([[1]], 3))


def test_the_limit_of_decode_is_the_slower_of_reading_and_multiplying():
    """Reading costs a step the same for any rows; multiplying costs each row the same."""
    limits = build_limits()
    fast = Limits(bandwidth={"a": [4.0 * SIZE.parameters]}, sgemm=[1e12], matrices={})

    assert limits.decode_rate(SIZE, 2) == pytest.approx(2000 / SIZE.decode_flop(2))
    assert fast.decode_rate(SIZE, 2) == pytest.approx(2)


def test_the_null_model_steps_through_the_real_engine():
    """As many times as asked, with requests waiting behind those that run."""
    assert len(step_times(rows=2, waiting=3, steps=5)) == 5


def test_the_null_engine_runs_what_it_is_given():
    """Sequences that end are followed by those that wait, and nothing is left."""
    engine = null_engine(2)
    for number in range(4):
        engine.add(Sequence(str(number), [TOKEN] * 20, SamplingParams(), frozenset(), 3, seed=0))
    outputs = []
    while engine.has_work:
        outputs += engine.step()

    engine.check_integrity()
    assert [output.request_id for output in outputs if output.finish_reason == "length"] == ["0", "1", "2", "3"]
    assert {token_id for output in outputs for token_id in output.token_ids} == {TOKEN}


def test_the_null_model_runs_behind_the_driver_threads():
    """All requests end; what a step took is above nothing."""
    assert driver_step_time(rows=2, steps=4) > 0


def test_a_ratio_above_one_is_better_whatever_the_unit():
    """Twice the rate, or half the time."""
    assert (ratio(4, 2, True), ratio(2, 4, False), ratio(2, 4, True)) == (2, 2, 0.5)
    assert (ratio(0, 4, False), ratio(0, 0, False)) == (float("inf"), 1)


def test_a_figure_is_the_median_beside_the_medians_of_others():
    """With the share of its limit."""
    measured = figure("serve small", "x", "tok/s", [1.0, 9.0, 3.0], others={"them": [2.0, 2.0, 6.0]}, limit=6.0)

    assert (measured.value, measured.others, measured.ratios, measured.share) == (
        3.0,
        {"them": 2.0},
        {"them": 1.5},
        0.5,
    )


def build_figures():
    """One with all there is, and one with nothing."""
    return [
        figure("serve small", "decode, 1 at once", "tok/s", [93.0], others={"them": [31.0]}, limit=100.0),
        figure("host", "1 row", "ms", [0.25, 0.5, 1234.0], more_is_better=False),
    ]


def test_the_table_has_ratios_first():
    """Then the share of the limit, and then the figure itself."""
    written = StringIO()

    show(build_figures(), Console(width=200, file=written))

    row = next(line for line in written.getvalue().splitlines() if "decode, 1 at once" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["decode, 1 at once", "3.00", "93%", "93", "tok/s", ""]
    assert "0.25 - 1,234" in written.getvalue()


def test_figures_are_saved_with_the_machine_they_were_measured_on(tmp_path):
    """Every field of them, as JSON."""
    save(build_figures(), {"cores": "2"}, tmp_path / "bench.json")

    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["machine"] == {"cores": "2"}
    assert saved["figures"][0].keys() == {
        "benchmark",
        "name",
        "unit",
        "runs",
        "value",
        "more_is_better",
        "others",
        "ratios",
        "limit",
        "share",
    }
    assert saved["figures"][0]["ratios"] == {"them": 3.0}


def test_figures_are_plotted_to_a_png(tmp_path):
    """Whether there are many or none."""
    pytest.importorskip("matplotlib")
    machine = {"processor": "p", "cores": "2", "date": "2026-01-01", "commit": "c"}

    plot(build_figures(), machine, tmp_path / "some.png")
    plot([], machine, tmp_path / "none.png")

    for name in ("some.png", "none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("given", ["vllm", "vllm=/nowhere/vllm", f"gemini={sys.executable}"])
def test_the_command_refuses_to_compare_without_a_program(capsys, given):
    """Before anything is measured, and says what to give."""
    with pytest.raises(SystemExit) as ended:
        command.main(["serve", "--vs", given])

    assert ended.value.code == 2
    assert f"transformers, llama.cpp, vllm, =, and its program, not '{given}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [(["/nowhere/lookup"], "must be llama.cpp's program"), ([sys.executable, "--model", "demo"], "not beside demo")],
)
def test_the_command_refuses_a_lookup_that_it_would_not_measure(capsys, given, why):
    """A program that is not there, and a model whose tokens llama.cpp would not read."""
    with pytest.raises(SystemExit) as ended:
        command.main(["speculation", "--llama-lookup", *given])

    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_random_requests_use_every_parameter():
    """One that is added to SamplingParams is missing here until it is asked for at random too."""
    rng = np.random.default_rng(0)

    for _ in range(100):
        msgspec.convert(random_params(rng), SamplingParams)

    assert PARAMETERS.keys() == set(SamplingParams.__struct_fields__)


def test_the_null_daemon_streams_to_a_real_client(monkeypatch):
    """Every token arrives, and the daemon's processor time for one is above nothing."""
    monkeypatch.setattr(host, "STREAMS", (2,))
    monkeypatch.setattr(host, "STREAM_TOKENS", 20)

    rate, cost = host.measure_streams(repeats=1)

    assert rate.value > 0 and cost.value > 0
