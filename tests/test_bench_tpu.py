"""``scripts/bench tpu`` and what people see of a plan, of one that was made up."""

import msgspec
import pytest

from engine.planner.chip_plan import ChipPlan
from engine.planner.compiled_function import CompiledFunction, Exchange
from engine.planner.roofline import DecodeStep
from ipc.commands.plan_tables import show_plan
from scripts.benchmarks.compiled.tpu import tpu_figures

pytestmark = pytest.mark.thorough

STEP = CompiledFunction(
    "step", 64, 12.5, 5 * 2**20, True, ["copy.1: bf16[64, 128], 2 times"], [], [Exchange("all-reduce", 2.0, 1, 1000)]
)
GREEDY = CompiledFunction("greedy", 64, 0.5, 2**20, False, [], [], [])


@pytest.fixture
def plan():
    """Of Llama-3-8B, say, on four of eight chips."""
    step = DecodeStep(64, 3_000_000_000, 3_150_000_000, 5_000_000, 0.004, 0.001, 0.002, 10_000.0)
    return ChipPlan(
        "config.json", "v5e:2x4", "TPU v5 lite", 8, 4, 2**34, 2**33, 2**31, "bfloat16", 2**28, 2**32, 100, 128, 12672, 8192, 1024,
        [STEP, GREEDY], 33.0, [step],
    )  # fmt: skip


def test_what_must_be_reached_is_the_limit_of_what_was_found(plan):
    """Copies, gathers, sums a layer, bytes, memory and seconds; 1.1 of 1.05 is more than reached, 10 s of 12.5 is not."""
    found = {figure.name: figure for figure in tpu_figures("Llama-3-8B", plan)}

    assert [figure.value for figure in found.values()] == [1, 0, 2, 1.05, 5, 12.5, 33, 10_000]
    assert found["read, of what 64 rows must"].share == pytest.approx(1.1 / 1.05)
    assert found["slowest bucket to compile"].share == pytest.approx(0.8)
    assert found["all-reduces a layer"].share == 1


def test_of_a_mixture_the_share_of_experts_is_a_figure(plan):
    """Of the step with the fewest rows."""
    plan = msgspec.structs.replace(plan, decode=[msgspec.structs.replace(plan.decode[0], experts_read=0.25)])

    *_, last = tpu_figures("Qwen3-30B-A3B", plan)

    assert (last.name, last.value, last.unit) == ("experts read by 64 rows, estimated", 25, "%")


def test_a_plan_is_shown(plan, capsys):
    """What a chip holds, the steps with their sums, what is not known of a sampler, and what decoding takes; whole in a pipe."""
    show_plan(plan)

    shown = capsys.readouterr().out
    assert "…" not in shown and "earlier requests" not in shown
    assert "config.json on 4 of the 8 TPU v5 lite of v5e:2x4" in shown
    for row in (
        ("64", "12.5", "5.2 MB", "2 all-reduce", "1 all-reduce", "copy.1: bf16[64, 128], 2 times"),
        ("greedy", "64", "0.5", "1.0 MB", "not known"),
        ("64", "3.0 GB", "3.1 GB", "5.0 MB", "4.00", "1.00", "2.00", "10,000"),
    ):
        assert any(line.replace("│", " ").split() == " ".join(row).split() for line in shown.splitlines())


def test_room_for_earlier_requests_is_shown_where_there_is_any(plan, capsys):
    """Beside the scratch."""
    show_plan(msgspec.structs.replace(plan, earlier=17_000_000))

    assert any(
        line.split()[:4] == ["earlier", "requests", "17.0", "MB:"]
        for line in capsys.readouterr().out.replace("│", " ").splitlines()
    )


def test_a_mixture_of_experts_is_shown_with_the_share_that_is_read(plan, capsys):
    """Marked as an estimate, in one more column."""
    (step,) = plan.decode

    show_plan(msgspec.structs.replace(plan, decode=[msgspec.structs.replace(step, experts_read=0.25)]))

    shown = capsys.readouterr().out.replace("│", " ")
    assert "experts read (estimate)" in " ".join(shown.split())
    assert any(line.split()[-2:] == ["10,000", "25%"] for line in shown.splitlines())


def test_steps_with_adapters_have_their_table(plan, capsys):
    """Where adapters are served, with the sums of these steps; they are not among what runs between steps."""
    adapted = msgspec.structs.replace(STEP, name="step with adapters", compile_seconds=17.5)

    show_plan(plan)
    without = capsys.readouterr().out
    show_plan(msgspec.structs.replace(plan, functions=[*plan.functions, adapted]))
    tables = capsys.readouterr().out.replace("│", " ")

    assert "adapters" not in without
    before, _, behind = tables.partition("Between steps, for most rows")
    assert "Steps with adapters, as they are compiled" in before and "17.5" in before
    assert "17.5" not in behind and "greedy" in behind


def test_no_digit_is_cut_where_the_terminal_is_narrow(plan, monkeypatch, capsys):
    """Numbers go on in the next line: 10,000 tokens/s are not "10,..."."""
    monkeypatch.setenv("COLUMNS", "50")

    show_plan(plan)

    assert "…" not in capsys.readouterr().out
